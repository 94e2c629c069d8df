"""Print the KV scales that transformers with compressed-tensors holds after loading checkpoints.

Usage: PYTHON kvq/engines/probes/probe_transformers.py CHECKPOINT...

One JSON object per line, {"checkpoint", "layers": {module: {"k_all", "v_all"}}} or {"checkpoint",
"error"}. It is run by `kvq verify --live transformers`; kvq is not needed there.
"""

import argparse
import json

from compressed_tensors.modeling import kvcache  # noqa: F401 - without it scales have no effect
from transformers import AutoModelForCausalLM


def load(path: str) -> dict[str, object]:
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    missing = {str(name) for name in info["missing_keys"]}
    layers = {}
    for name, module in model.named_modules():
        if hasattr(module, "k_scale") and hasattr(module, "v_scale"):
            layers[name] = {
                f"{side}_all": None
                if f"{name}.{side}_scale" in missing  # memory that nobody wrote
                else getattr(module, f"{side}_scale").float().flatten().tolist()
                for side in ("k", "v")
            }
    return {"checkpoint": path, "layers": layers}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kv-cache-dtype", default="auto")  # has no meaning here
    parser.add_argument("checkpoints", nargs="+")
    for path in parser.parse_args().checkpoints:
        try:
            print(json.dumps(load(path)), flush=True)
        except Exception as error:  # the error is the answer for this checkpoint
            print(
                json.dumps({"checkpoint": path, "error": f"{type(error).__name__}: {error}"}),
                flush=True,
            )


main()
