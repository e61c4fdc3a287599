"""Token shards: plain rows in the Optimization Track's order, and rows of documents in the Main Track's."""

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


def _paths(pattern):
    paths = sorted(glob.glob(pattern))
    if not paths:
        raise SystemExit(f"no shard matches {pattern}")
    return paths


def batches(pattern, batch_tokens, seq_len, repeat=1):
    """Yields (inputs, targets), each (rows, seq_len) int64. A shard's last, incomplete batch is dropped: the next batch needs one token
    more than it predicts, and one to spare."""
    for path in _paths(pattern) * repeat:
        tokens = open_shard(path)
        position = 0
        while position + batch_tokens + 1 < tokens.size:
            piece = torch.from_numpy(tokens[position : position + batch_tokens + 1].astype(np.int64))
            yield piece[:-1].view(-1, seq_len), piece[1:].view(-1, seq_len)
            position += batch_tokens


def document_batches(pattern, rows, bos, shape_of_step, repeat=1):
    """Yields (inputs, targets, starts), each (rows, n) int64: documents one after the other, cut at max_seq_len and where a row is full
    (the rest is skipped); starts[t] is the index in the row at which the document of token t begins. A row takes n + 1 tokens, the last
    one as a target only. shape_of_step(s) -> (n, max_seq_len). A step that a shard cannot fill is filled from the start of the next."""
    s = 0
    for path in _paths(pattern) * repeat:
        tokens = open_shard(path).astype(np.int64)
        begins = np.flatnonzero(tokens == bos)
        ends = np.append(begins[1:], tokens.size)
        document = 0
        while True:
            n, max_seq_len = shape_of_step(s)
            batch, next_document = [], document
            for _ in range(rows):
                row, starts = [], []
                while len(row) <= n and next_document < begins.size:
                    begin = begins[next_document]
                    length = min(ends[next_document] - begin, max_seq_len, n + 1 - len(row))
                    starts += [len(row)] * length
                    row += tokens[begin : begin + length].tolist()
                    next_document += 1
                batch.append((row, starts))
            if len(batch[-1][0]) <= n:
                break
            document = next_document
            row, starts = (torch.tensor(part) for part in zip(*batch))
            yield row[:, :-1], row[:, 1:], starts[:, :-1]
            s += 1
