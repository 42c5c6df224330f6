"""The little of HDF5 that a rank's file uses, read without the HDF5 library.

A statistics file may come from anywhere. The library allocates what a file declares, follows links to other files and
runs filters; what it does with damaged metadata is its own affair. The files that hpctk writes need none of that: they
are of the oldest format (superblock 0), groups are symbol tables, columns lie in one piece. So their structure is read
here, each access checked against the file's length, every count bounded; anything else is refused by name.

Everything raises HpctkError with a text that goes after the file's name. The format is described in "HDF5 File Format
Specification Version 3.0", sections II.A (superblock 0), III.A to III.D and IV.A.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Container
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import Any

import numpy as np

from hpctk.errors import HpctkError

SIGNATURE = b"\x89HDF\r\n\x1a\n"
#: Links in a group, nodes of its tree, messages of an object: a file that hpctk wrote has far fewer.
MOST = 4096
#: Bytes of the names in a group, and of an object's messages.
_MOST_BYTES = 1 << 20
_HEAD_BYTES = 512
_UNDEFINED = 0xFFFF_FFFF_FFFF_FFFF
_SYMBOL_TABLE, _CONTINUATION = 0x11, 0x10
_SOFT_LINK = 2

_SUPERBLOCK = Struct("<8s8B2HI4Q2Q")
_HEADER = Struct("<BxHII4x")
_MESSAGE = Struct("<HHB3x")
_TWO = Struct("<QQ")
_NODE = Struct("<4sBBHQQ")
_LEAF = Struct("<4sBxH")
_ENTRY = Struct("<QQI20x")
_HEAP = Struct("<4sB3xQQQ")

#: Messages of an object by type, in their order.
Messages = list[tuple[int, bytes]]


class PlainFile:
    """An open file. Reads of bytes beyond its end are an error, not short."""

    def __init__(self, path: Path) -> None:
        # Not blocking: the name may be that of a pipe nobody writes to.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise HpctkError("is not a file")
            self.length = status.st_size
            #: Another one where the file was replaced.
            self.identity = (status.st_dev, status.st_ino, status.st_size)
            self.root = self._root()
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> PlainFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def at(self, offset: int, nbytes: int) -> bytes:
        """Return bytes of the file."""
        self._check(offset, nbytes)
        data = os.pread(self._descriptor, nbytes, offset)
        if len(data) < nbytes:
            raise HpctkError("is cut off")
        return data

    def array(self, offset: int, rows: int, dtype: np.dtype[Any]) -> Any:
        """Return values of the file."""
        nbytes = rows * dtype.itemsize
        self._check(offset, nbytes)
        values = np.empty(rows, dtype)
        left = memoryview(values.data).cast("B") if nbytes else memoryview(b"")
        while left:
            count = os.preadv(self._descriptor, [left], offset)
            if not count:
                raise HpctkError("is cut off")
            left, offset = left[count:], offset + count
        return values

    def _check(self, offset: int, nbytes: int) -> None:
        if offset + nbytes > self.length:
            raise HpctkError(f"is damaged: {nbytes} bytes at {offset} lie beyond its end")

    def _root(self) -> int:
        """Return where the root group's header lies."""
        if self.length == 0:
            raise HpctkError("is empty")
        if self.at(0, min(8, self.length)) != SIGNATURE:
            raise HpctkError("is no HDF5 file")
        if self.length < _SUPERBLOCK.size:
            raise HpctkError("is cut off")
        fields = _SUPERBLOCK.unpack(self.at(0, _SUPERBLOCK.size))
        version, offset_bytes, length_bytes = fields[1], fields[6], fields[7]
        base, end, root = fields[12], fields[14], fields[17]
        if (version, offset_bytes, length_bytes, base) != (0, 8, 8, 0):
            raise HpctkError(
                f"is HDF5, but not as hpctk lays it out (superblock {version}); did another program rewrite it?"
            )
        if end > self.length:
            raise HpctkError(f"is cut off: it has {self.length} bytes of {end}")
        return int(root)

    def messages(self, address: int, wanted: Container[int] | None = None) -> Messages:
        """Return the messages of an object, continuations and all; those of some types alone where it is said."""
        # Nearly all objects are shorter: one read instead of two.
        head = self.at(address, max(_HEADER.size, min(_HEAD_BYTES, self.length - address)))
        version, count, _, nbytes = _HEADER.unpack_from(head)
        if version != 1:
            raise HpctkError(f"is damaged: no object lies at {address}")
        found: Messages = []
        blocks, left = [(address + _HEADER.size, nbytes)], _MOST_BYTES
        for start, length in blocks:
            left -= length
            if left < 0 or count > MOST:
                raise HpctkError(f"is damaged: the object at {address} is too long")
            if start == address + _HEADER.size and _HEADER.size + length <= len(head):
                block = head[_HEADER.size : _HEADER.size + length]
            else:
                block = self.at(start, length)
            place, last = 0, length - _MESSAGE.size
            while place <= last and count:
                kind, size, flags = _MESSAGE.unpack_from(block, place)
                place, begin = place + _MESSAGE.size + size, place + _MESSAGE.size
                if place > length:
                    raise HpctkError(f"is damaged: a message of the object at {address} is cut off")
                count -= 1
                if kind == _CONTINUATION and size >= _TWO.size:
                    blocks.append(_TWO.unpack_from(block, begin))
                elif wanted is None or kind in wanted:
                    # A message that is shared says where it is instead of what: nothing that hpctk writes does.
                    found.append((-kind if flags & 2 else kind, block[begin:place]))
        return found

    def links(self, messages: Messages) -> dict[str, int]:
        """Return where the objects of a group lie, by name. Soft links are not followed: they lie at -1."""
        table = next((data for kind, data in messages if kind == _SYMBOL_TABLE), b"")
        if len(table) < _TWO.size:
            raise HpctkError("is not as hpctk lays it out: a table is no plain group")
        tree, heap = _TWO.unpack_from(table)
        signature, _, nbytes, _, start = _HEAP.unpack(self.at(heap, _HEAP.size))
        if signature != b"HEAP" or nbytes > _MOST_BYTES:
            raise HpctkError("is damaged: the names of a group are not where they should be")
        names = self.at(start, nbytes)
        found: dict[str, int] = {}
        for leaf in self._leaves(tree):
            signature, _, count = _LEAF.unpack(self.at(leaf, _LEAF.size))
            if signature != b"SNOD" or len(found) + count > MOST:
                raise HpctkError("is damaged: a group is not as it should be")
            for name, address, kind in _ENTRY.iter_unpack(self.at(leaf + _LEAF.size, count * _ENTRY.size)):
                text = names[name : max(name, names.find(b"\0", name))].decode(errors="replace")
                found[text] = -1 if kind == _SOFT_LINK or address == _UNDEFINED else address
        return found

    def _leaves(self, tree: int) -> list[int]:
        """Return where the leaves of a group's tree lie."""
        nodes = [tree]
        leaves: list[int] = []
        for node in nodes:
            signature, kind, level, count, _, _ = _NODE.unpack(self.at(node, _NODE.size))
            if signature != b"TREE" or kind != 0:
                raise HpctkError("is damaged: the tree of a group is not where it should be")
            # A key, then child and key in turn.
            children = [child for child, _ in _TWO.iter_unpack(self.at(node + _NODE.size + 8, 16 * count))]
            (nodes if level else leaves).extend(children)
            if len(nodes) + len(leaves) > MOST:
                raise HpctkError(f"is damaged: the tree of a group has more than {MOST} nodes")
        return leaves
