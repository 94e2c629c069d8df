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

from kvq.geometry.config import DEFAULTED, HIDDEN, NUM_HEADS

OUT = Path(__file__).parents[1] / "kvq" / "geometry" / "defaults.json"


def without_derived(config_class: type, values: dict) -> dict:
    """Leave out what the class derives from heads or hidden size, such as `head_dim`."""
    kept = dict(values)
    for changed in (NUM_HEADS, HIDDEN):
        name = next((name for name in changed if type(values.get(name)) is int), None)
        if name is None:
            continue
        try:
            other = config_class(**{name: 2 * values[name]})
        except Exception as error:
            print(f"{config_class.__name__} does not take another {name}: {type(error).__name__}")
            continue
        now = {**other.to_dict(), **vars(other)}
        same_heads = set(changed)
        for key in DEFAULTED:
            if key not in same_heads and now.get(key) != values.get(key):
                kept.pop(key, None)
    return kept


def main() -> None:
    found = {}
    for model_type in sorted(CONFIG_MAPPING):
        try:
            config = CONFIG_MAPPING[model_type]()
        except Exception as error:  # some classes cannot be made without arguments
            print(f"no defaults for {model_type}: {type(error).__name__}")
            continue
        values = {**config.to_dict(), **{k: v for k, v in vars(config).items() if k in DEFAULTED}}
        values = without_derived(CONFIG_MAPPING[model_type], values)
        kept = {k: values[k] for k in DEFAULTED if type(values.get(k)) in (int, bool)}
        if kept:
            found[model_type] = kept
    document = {"transformers": transformers.__version__, "defaults": found}
    lines = json.dumps(document["defaults"], sort_keys=True).replace("}, ", "},\n")
    OUT.write_text(f'{{"transformers": "{transformers.__version__}", "defaults":\n{lines}}}\n')
    print(f"{len(found)} model types in {OUT.name}")


main()
