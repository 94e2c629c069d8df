"""Write kvq/geometry/defaults.json: what transformers assumes where a config.json is silent.

Usage: python scripts/make_config_defaults.py

Published configs leave out values that equal the defaults of their class. kvq reads config.json
without transformers, so it carries the defaults that decide about layers, heads and head sizes.
"""

import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # some classes ask the hub for a backbone

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvq.geometry.config import DEFAULTED

OUT = Path(__file__).parents[1] / "kvq" / "geometry" / "defaults.json"


def main() -> None:
    found = {}
    for model_type in sorted(CONFIG_MAPPING):
        try:
            config = CONFIG_MAPPING[model_type]()
        except Exception as error:  # some classes cannot be made without arguments
            print(f"no defaults for {model_type}: {type(error).__name__}")
            continue
        values = {**config.to_dict(), **{k: v for k, v in vars(config).items() if k in DEFAULTED}}
        kept = {k: values[k] for k in DEFAULTED if type(values.get(k)) in (int, bool)}
        if kept:
            found[model_type] = kept
    document = {"transformers": transformers.__version__, "defaults": found}
    lines = json.dumps(document["defaults"], sort_keys=True).replace("}, ", "},\n")
    OUT.write_text(f'{{"transformers": "{transformers.__version__}", "defaults":\n{lines}}}\n')
    print(f"{len(found)} model types in {OUT.name}")


main()
