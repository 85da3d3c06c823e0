"""Convert a GGUF file to a model folder (config, tokenizer, safetensors in half precision) for a text task.

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
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if tokenizer.eos_token_id not in ends:
        read = (
            f"as transformers {transformers.__version__} reads the file, its tokenizer ends texts with {tokenizer.eos_token_id}"
        )
        told = f"the model with {' or '.join(map(str, ends))}: nothing was written"
        sys.exit(f"{read}, {told}, try another version (5.22.2 reads SmolLM2's as it is)")
    if tokenizer.pad_token_id is None:
        print("the tokenizer has no token to pad with: name one with --set task.pad_token=...", file=sys.stderr)


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
