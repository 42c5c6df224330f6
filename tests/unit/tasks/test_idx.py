"""IDX files: read whole, packed or not; damaged ones are named, with what is wrong."""

import gzip

import idx_files
import numpy as np
import pytest

from hpctk.errors import HpctkError
from hpctk.tasks.core.images import read_idx

IMAGES = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
WHOLE = idx_files.idx(IMAGES)
# Without the time of day: names of tests must be the same in every process.
PACKED = gzip.compress(WHOLE, mtime=0)


@pytest.mark.parametrize("content", [WHOLE, PACKED], ids=["plain", "gzip"])
def test_reads_what_was_written(tmp_path, content):
    # The name says nothing: what is inside counts.
    (tmp_path / "file").write_bytes(content)
    np.testing.assert_array_equal(read_idx(tmp_path / "file", 3), IMAGES)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"", "not an IDX file: it begins with nothing"),
        (b"\x89PNG", "not an IDX file: it begins with 89 50 4e 47"),
        (b"\0\0\x08\0", "not an IDX file"),
        (WHOLE[:3], "not an IDX file"),
        (idx_files.idx(IMAGES, kind=0x0D), "elements of type 0x0d, need unsigned bytes"),
        (idx_files.idx(IMAGES[0]), "2 dimensions, need 3"),
        (WHOLE[:9], "cut short inside its header"),
        (WHOLE[:-1], "promises 5 x 4 x 3 = 60 bytes, but it holds 59 bytes"),
        (WHOLE + b"x", "but it holds more"),
        (b"\0\0\x08\x03" + b"\xff" * 12 + b"few", "but it holds 3 bytes"),
        (PACKED[:-9], "damaged or cut short"),
        (PACKED[:20], "damaged or cut short"),
        (PACKED[:12] + b"\xff\xff\xff\xff" + PACKED[16:], "damaged or cut short"),
        (PACKED[:-8] + b"\0\0\0\0" + PACKED[-4:], "damaged or cut short"),
    ],
)
def test_damaged_files(tmp_path, content, wanted):
    path = tmp_path / "train-images"
    path.write_bytes(content)
    with pytest.raises(HpctkError, match="train-images: .*" + wanted.replace("(", r"\(")):
        read_idx(path, 3)
