"""Plain rows of token shards in the Optimization Track's order."""

import glob

import numpy as np
import torch


def open_shard(path):
    header = np.fromfile(path, dtype="<i4", count=256)
    if header.size < 256 or header[0] != 20240520 or header[1] != 1:
        raise SystemExit(f"{path}: not a token shard (magic 20240520, version 1 expected)")
    tokens = np.memmap(path, dtype="<u2", mode="r", offset=1024)
    if tokens.size != header[2]:
        raise SystemExit(f"{path}: the header announces {header[2]} tokens, the file holds {tokens.size}")
    return tokens


def batches(pattern, batch_tokens, seq_len, repeat=1):
    """Yields (inputs, targets), each (rows, seq_len) int64. A shard's last, incomplete batch is dropped: the next batch needs one token
    more than it predicts, and one to spare."""
    paths = sorted(glob.glob(pattern))
    if not paths:
        raise SystemExit(f"no shard matches {pattern}")
    for _ in range(repeat):
        for path in paths:
            tokens = open_shard(path)
            position = 0
            while position + batch_tokens + 1 < tokens.size:
                piece = torch.from_numpy(tokens[position : position + batch_tokens + 1].astype(np.int64))
                yield piece[:-1].view(-1, seq_len), piece[1:].view(-1, seq_len)
                position += batch_tokens
