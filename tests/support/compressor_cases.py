"""What the tests of all compressors share: one of each, and tensors that make trouble."""

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hpctk.compressors import QSGD, ChunkTopK, Half, Identity, PowerSGD, RandomK, Sign, TopK

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

#: Makers, not compressors: some remember, and tests must not depend on each other.
MAKERS = {
    "identity": Identity,
    "half": Half,
    "half-bfloat16": lambda: Half("bfloat16"),
    "topk": lambda: TopK(0.3),
    "topk-all": lambda: TopK(1.0),
    "chunktopk": ChunkTopK,
    "chunktopk-signed": lambda: ChunkTopK(2, 64, 3, "signed"),
    "chunktopk-exact": lambda: ChunkTopK(1, 5, None),
    "randomk": lambda: RandomK(0.3),
    "randomk-all": lambda: RandomK(1.0),
    "sign": Sign,
    "qsgd": lambda: QSGD(4, bucket=7),
    "qsgd-2": lambda: QSGD(2),
    "qsgd-8": lambda: QSGD(8, bucket=1),
    "powersgd": lambda: PowerSGD(1),
    "powersgd-2": lambda: PowerSGD(2),
}
EXACT = ("identity", "topk", "chunktopk-exact", "randomk")


def is_exact(key):
    """Whether a compressor sends values unchanged or not at all."""
    return key.startswith(EXACT)


@st.composite
def tensors(draw, dtype=None, shape=None):
    """Any finite values, zeros and denormals too, in any layout."""
    dtype = draw(st.sampled_from(DTYPES)) if dtype is None else dtype
    width = {torch.float16: 16, torch.float64: 64}.get(dtype, 32)
    if shape is None:
        shape = draw(st.one_of(npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7), st.just((5, 40))))
    ordinary = st.floats(-10, 10, width=width)
    anything = st.floats(allow_nan=False, allow_infinity=False, width=width)
    few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0])
    elements = draw(st.sampled_from([ordinary, anything, few]))
    array = draw(npst.arrays(f"f{width // 8}", shape, elements=elements))
    tensor = torch.from_numpy(array).to(dtype)
    limit = torch.finfo(dtype).max
    return lay_out(tensor.clamp(-limit, limit), draw(st.sampled_from(["plain", "turned", "spread"])))


def lay_out(tensor, layout):
    """Return the same values in another order in memory."""
    if layout == "turned":
        turned = tuple(reversed(range(tensor.dim())))
        return tensor.permute(turned).contiguous().permute(turned)
    if layout == "spread" and tensor.dim():
        room = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
        room[..., ::2] = tensor
        return room[..., ::2]
    return tensor


def bits(tensor):
    """The bytes of a tensor, for comparing to the last bit."""
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def rounding(decoded, left, total):
    """By how much decoded + left misses total, in units of one rounding of the larger of the two."""
    wide = np.longdouble
    parts = [np.asarray(t.double().numpy()).astype(wide) for t in (decoded, left, total)]
    unit = wide(torch.finfo(total.dtype).eps) * np.maximum(np.abs(parts[0]), np.abs(parts[1]))
    error = np.abs(parts[0] + parts[1] - parts[2])
    return float(np.max(error / np.maximum(unit, np.finfo(wide).tiny), initial=0))
