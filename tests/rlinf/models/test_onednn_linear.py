"""Linear layers through oneDNN: the same results, gradients and parameters as torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rlinf.models.onednn_linear import OneDNNLinear, has_onednn, use_onednn

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    bias=st.booleans(),
)
def test_output_and_gradients_are_those_of_torch(
    shape: list[int], sizes: tuple[int, int], bias: bool
) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(*sizes, bias=bias)
    quick = copy.deepcopy(plain)
    use_onednn(quick)
    assert type(quick) is OneDNNLinear
    outcomes = []
    for layer in (plain, quick):
        values = torch.linspace(-1, 1, sizes[0]).expand(*shape, -1).clone().requires_grad_()
        output = layer(values)
        (output * torch.linspace(0, 1, sizes[1])).sum().backward()
        outcomes.append([output.detach(), values.grad, *(p.grad for p in layer.parameters())])
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_frozen_weights_get_no_gradient() -> None:
    layer = nn.Linear(4, 3)
    use_onednn(layer)
    layer.weight.requires_grad_(False)
    values = torch.ones(2, 4, requires_grad=True)
    layer(values).sum().backward()
    assert layer.weight.grad is None
    assert values.grad is not None
    assert layer.bias.grad is not None


def test_empty_input_and_other_types_go_torchs_way() -> None:
    layer = nn.Linear(4, 3)
    use_onednn(layer)
    assert layer(torch.empty(0, 4)).shape == (0, 3)
    half = nn.Linear(4, 3, dtype=torch.bfloat16)
    use_onednn(half)
    assert half(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    # An adapter's own kind of layer keeps its own forward pass.
    odd = nn.Sequential(nn.Bilinear(2, 2, 2), OneDNNLinear(2, 2))
    use_onednn(odd)
    assert type(odd[0]) is nn.Bilinear
