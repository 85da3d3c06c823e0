"""Round a model folder's weights to half precision (float16) to halve its size.

    python -m benchmarks.halve FOLDER OUT

Training begins from the rounded weights, in float32. Records name the digest of what they began from; `config.json`, which is part
of it, is written by transformers, and not by all of its versions in the same words (5.22.2 for those in results/).
"""

import sys
from pathlib import Path
from shutil import copyfile

import torch
from transformers import AutoModel

from fedecho.tasks.text.pretrained import TOKENIZER_FILES, files_of


def halve(folder: Path, out: Path) -> None:
    AutoModel.from_pretrained(folder, dtype=torch.float16, local_files_only=True).save_pretrained(out)
    for file in (file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)):
        copyfile(file, out / file.name)
    print(files_of(out))


if __name__ == "__main__":
    if len(sys.argv) != 3 or not Path(sys.argv[1]).is_dir():
        sys.exit(__doc__)
    halve(Path(sys.argv[1]), Path(sys.argv[2]))
