"""Selection of the most deviating tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.reuse.policies.cacheblend import CacheBlend


def test_the_most_deviating_tokens_are_selected_in_order():
    truth = torch.randn(2, 6, 4)
    estimate = truth.clone()
    estimate[0, 4] += 2.0
    estimate[:, 1] -= 1.0
    estimate[1, 3] += 0.1
    assert CacheBlend(share=2 / 6).select(estimate, truth).tolist() == [1, 4]
    assert CacheBlend(share=0.5).select(estimate, truth).tolist() == [1, 3, 4]


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(0, 40), share=st.floats(0, 1))
def test_the_share_is_rounded_up(tokens, share):
    chosen = CacheBlend(share=share).select(torch.randn(1, tokens, 2), torch.randn(1, tokens, 2)).tolist()
    assert share * tokens <= len(chosen) <= share * tokens + 1
    assert chosen == sorted(set(chosen))


def test_wrong_arguments_are_named():
    with pytest.raises(ConfigurationError, match="share"):
        CacheBlend(share=1.5)
    with pytest.raises(ValueError, match="differ in shape"):
        CacheBlend(share=0.5).select(torch.zeros(1, 2, 3), torch.zeros(1, 3, 3))
