"""A GGUF file as an ordinary model folder (config, tokenizer, safetensors in half precision) that a text task can name.

    pip install gguf
    python -m benchmarks.convert_gguf FOLDER/model.gguf OUT

The quantised weights are unpacked to float32 by transformers and kept in bfloat16. Some of its versions (5.17 is one) read another
tokenizer out of the file than the model was trained with; 5.22 reads SmolLM2's as it is.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer


def same_ends(tokenizer: Any, config: Any) -> None:
    """The token that ends a text is another for the tokenizer than for the model: then it was not read as it is."""
    if tokenizer.eos_token_id != config.eos_token_id or tokenizer.pad_token_id is None:
        told = f"ends texts with token {tokenizer.eos_token_id} and pads with {tokenizer.pad_token_id}"
        sys.exit(
            f"as transformers {transformers.__version__} reads the file, its tokenizer {told}, where the model ends them with "
            f"{config.eos_token_id}: nothing was written, try another version (5.22.2 is known to read SmolLM2's)"
        )


def convert(file: Path, out: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    unpacked = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = unpacked.config
    same_ends(tokenizer, config)
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
