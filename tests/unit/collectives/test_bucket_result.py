"""What comes of a bucket of gradients: divided when it is written, with the bits of a mean."""

import pytest
import torch

from hpctk.collectives.bucket_result import BucketResult


@pytest.mark.parametrize("divisor", [1, 2, 3, 4, 7])
def test_the_quotient_is_written_where_it_is_to_go(divisor):
    flat = torch.randn(12, generator=torch.Generator().manual_seed(0)) * 1e20
    target = torch.empty(2, 3).t()
    parts = BucketResult(flat, divisor).parts([4, 6, 2])
    parts[1].write(target)
    assert torch.equal(target, (flat[4:10] / divisor).view(3, 2))
    assert not target.is_contiguous()
    assert [len(part.flat) for part in parts] == [4, 6, 2]
    # A view: nothing was divided where it lies.
    assert parts[0].flat.data_ptr() == flat.data_ptr()
