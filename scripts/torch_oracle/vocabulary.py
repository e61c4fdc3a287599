"""GPT-2's vocabulary as byte strings, from vocab.bpe alone, and each token's longest proper prefix."""

import os


def token_bytes(folder, vocab_size):
    """The bytes of ids 0 … vocab_size − 2: 256 single bytes, then one token a merge. The last id ends a text and has none."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    # vocab.bpe writes a byte that is no printable character as one from U+0100 on.
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    tokens = [bytes([byte]) for byte in (*printable, *others)]
    with open(os.path.join(folder, "vocab.bpe"), encoding="utf-8") as file:
        merges = [line for line in file.read().split("\n")[1:] if line]
    for merge in merges[: vocab_size - 257]:
        tokens.append(bytes(byte_of[character] for character in merge.replace(" ", "")))
    if len(tokens) != vocab_size - 1:
        raise SystemExit(f"{folder}: {len(tokens)} tokens, the configuration has {vocab_size} with the end of text")
    return tokens


def prefix_table(folder, vocab_size, rows):
    """The token whose bytes are the longest proper prefix of each id's; −1 where there is none."""
    tokens = token_bytes(folder, vocab_size)
    ids = {token: i for i, token in enumerate(tokens)}
    table = [-1] * rows
    for i, token in enumerate(tokens):
        table[i] = next((ids[token[:length]] for length in range(len(token) - 1, 0, -1) if token[:length] in ids), -1)
    return table
