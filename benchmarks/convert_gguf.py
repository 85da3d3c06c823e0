"""A GGUF file as an ordinary model folder (config, tokenizer, safetensors in half precision) that a text task can name.

    pip install gguf
    python -m benchmarks.convert_gguf FOLDER/model.gguf OUT

The quantised weights are unpacked to float32 by transformers and kept in bfloat16.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(file: Path, out: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    unpacked = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = unpacked.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # A model that came from GGUF refuses to be saved; one with the same weights does not.
    plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(unpacked.state_dict())
    plain.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
