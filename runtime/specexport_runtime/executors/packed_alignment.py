"""Packed weights at aligned places of their file, which ONNX Runtime leaves undone.

ONNX Runtime 1.31 puts what is longer than 1 MB at a page of the file, and anything shorter right behind what came
before. A packed ``MatMulNBits`` weight is codes, block sums and scales in one buffer; where each begins follows from
the *address* of the buffer, rounded up to 32 and 64 bytes, and its length is no multiple of those. So behind a packed
weight a short one begins at an odd address, and the kernel looks for its scales some bytes beside where they were
written: logits are wrong, most of them NaN. Nothing checks it.

Here such buffers are copied to an aligned place at the end of the file, and the graph is told. No setting of ONNX
Runtime does this.
"""

from pathlib import Path
from typing import BinaryIO

from specexport_runtime.executors.external_data import external_entries, read_model

ALIGNMENT = 64
"""Bytes: how ONNX Runtime's own buffers are aligned, and the most that a kernel rounds an address up to."""
_PACKED_KEY = "prepacked"


def align_packed(graph: Path, data: Path) -> int:
    """Move the packed weights of an optimized graph that lie at odd addresses.

    Args:
        graph: the graph file that ONNX Runtime wrote.
        data: its file of weights, packed ones included.

    Returns:
        buffers that were moved.
    """
    model = read_model(graph)
    moved = 0
    with data.open("r+b") as file:
        for entry in external_entries(model.graph):
            if not entry.key.startswith(_PACKED_KEY):
                continue
            # key|offset;length;checksum|offset;length;checksum…, one for each buffer of the weight
            key, *buffers = entry.value.split("|")
            for i, buffer in enumerate(buffers):
                offset, length, checksum = buffer.split(";")
                if int(offset) % ALIGNMENT:
                    buffers[i] = f"{_copy_to_end(file, int(offset), int(length))};{length};{checksum}"
                    moved += 1
            entry.value = "|".join([key, *buffers])
    if moved:
        graph.write_bytes(model.SerializeToString())
    return moved


def _copy_to_end(file: BinaryIO, offset: int, length: int) -> int:
    file.seek(offset)
    content = file.read(length)
    if len(content) != length:
        raise ValueError(f"packed weights of {length} bytes at {offset} reach beyond the end of their file")
    end = -(-file.seek(0, 2) // ALIGNMENT) * ALIGNMENT
    file.seek(end)
    file.write(content)
    return end
