"""Reads and writes safetensors files: a length (uint64), a JSON table of name -> dtype, shape and byte range, then the bytes."""

import json
import struct

import numpy as np
import torch

_NUMPY = {"F64": np.float64, "F32": np.float32, "BF16": np.uint16, "I64": np.int64, "I32": np.int32}


def save(path, tensors, metadata=None, keep_bf16=False):
    """tensors: name -> torch tensor; FP32 and FP64 keep their type, and BF16 if wanted; everything else is written as FP32."""
    arrays = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.dtype == torch.bfloat16 and keep_bf16:
            arrays[name] = "BF16", tensor.view(torch.uint16).numpy()
        elif tensor.dtype == torch.float64:
            arrays[name] = "F64", tensor.numpy()
        else:
            arrays[name] = "F32", tensor.float().numpy()
    table = {"__metadata__": {key: str(value) for key, value in metadata.items()}} if metadata else {}
    offset = 0
    for name, (dtype, array) in arrays.items():
        table[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for _, array in arrays.values():
            file.write(array.tobytes())


def load(path):
    """name -> torch tensor; BF16 comes back as FP32 with the same values."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    length = struct.unpack("<Q", data[:8].tobytes())[0]
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length].tobytes()).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        array = np.frombuffer(data[begin:end].tobytes(), dtype=_NUMPY[entry["dtype"]])
        if entry["dtype"] == "BF16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        tensors[name] = torch.from_numpy(array.reshape(entry["shape"]).copy())
    return tensors
