"""The commands: parse options, call the pipeline, hand the result to the console."""
