"""One function per command: plain values in, data out. They print nothing."""
