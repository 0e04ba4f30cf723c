"""What holds for every policy. Parametrised over the registry: a new policy is tested the moment it is registered."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.reuse.edge import Edge
from kvcomm_integrations.reuse.kv import KV
from kvcomm_integrations.reuse.policies import create_policy
from kvcomm_integrations.reuse.policies.learning import LearningPolicy
from kvcomm_integrations.reuse.policies.policy import Policy
from kvcomm_integrations.reuse.scratch import Scratch
from kvcomm_integrations.reuse.traits import POLICIES, POLICY_NAMES, policy_traits

from .shapes import EDGE, drifted, largest_difference, random_kv

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=POLICY_NAMES)
def policy(request) -> Policy:
    return create_policy(request.param)


def teach(
    policy: Policy, examples: int, tokens: int = 12, edge: Edge = EDGE, dtype: torch.dtype = torch.float32
) -> None:
    for _ in range(examples):
        reference = random_kv(tokens)
        policy.observe(edge, reference, drifted(reference))


def test_name_and_traits_agree_with_the_registry(policy):
    assert create_policy(policy.name).name == policy.name
    assert policy.traits == policy_traits(policy.name) == POLICIES[policy.name]
    assert policy.traits.class_name == type(policy).__name__
    assert policy.traits.learns == isinstance(policy, LearningPolicy)
    assert policy_traits("none such") is None


def test_unknown_names_and_options_are_refused_with_the_valid_ones(policy):
    with pytest.raises(ConfigurationError, match=r"'rigde' does not exist.*ridge"):
        create_policy("rigde")
    with pytest.raises(ConfigurationError, match=rf"{policy.name}.*no option 'rnak'"):
        create_policy(policy.name, rnak=3)


def test_a_name_may_carry_options():
    policy = create_policy("kvcmas:rank=4:selective=true:gamma=0.5", max_anchors=7, rank=9)
    assert (policy.rank, policy.selective, policy.gamma, policy.max_anchors) == (4, True, 0.5, 7)
    assert policy_traits("kvcmas:rank=4") == policy_traits("kvcmas")
    assert policy_traits("rigde:rank=4") is None


@pytest.mark.parametrize(
    "name", ["kvcmas:rank", "kvcmas:", "kvcmas:rank=", "kvcmas:=3", "kvcmas:rank='4'", "kvcmas:rank=[4]"]
)
def test_options_that_cannot_be_read_are_refused(name):
    with pytest.raises(ConfigurationError, match="NAME:OPTION=VALUE"):
        create_policy(name)


@pytest.mark.parametrize("examples", [0, 1, 4])
def test_layer_0_is_never_touched(policy, examples):
    teach(policy, examples)
    content = random_kv(9)
    estimate = policy.correct(EDGE, content, start=2)
    assert torch.equal(estimate.keys[0], content.keys[0]) and torch.equal(estimate.values[0], content.values[0])


def test_an_unknown_edge_returns_the_reference(policy):
    teach(policy, 2)
    content = random_kv(9)
    for other in (EDGE._replace(target="critic"), EDGE._replace(scope="another tenant")):
        assert largest_difference(policy.correct(other, content), content) == 0 or not policy.traits.learns
        assert policy.ready(other).examples == 0 and policy.state_bytes(other) == 0


def test_the_reference_is_not_written_to(policy):
    teach(policy, 2)
    content = random_kv(9)
    before = KV(content.keys.clone(), content.values.clone())
    policy.correct(EDGE, content)
    policy.observe(EDGE, content, drifted(content))
    policy.ready(EDGE, content)
    assert largest_difference(before, content) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_agree_within_rounding(policy, dtype):
    torch.manual_seed(1)
    narrow = create_policy(policy.name)
    for _ in range(3):
        reference = random_kv(12)
        truth = drifted(reference)
        rounded = [KV(kv.keys.to(dtype), kv.values.to(dtype)) for kv in (reference, truth)]
        narrow.observe(EDGE, *rounded)
        policy.observe(EDGE, *(KV(kv.keys.float(), kv.values.float()) for kv in rounded))
    content = random_kv(9, dtype=dtype)
    estimate = narrow.correct(EDGE, content)
    assert estimate.keys.dtype == estimate.values.dtype == dtype
    wide = policy.correct(EDGE, KV(content.keys.float(), content.values.float()))
    assert largest_difference(estimate, wide) <= 16 * torch.finfo(dtype).eps + 1e-5


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_short_contents_and_shallow_models(policy, tokens, layers):
    for taught in (0, 1, 7):
        reference = random_kv(taught, layers=layers)
        policy.observe(EDGE, reference, drifted(reference))
    content = random_kv(tokens, layers=layers)
    policy.ready(EDGE, content)
    estimate = policy.correct(EDGE, content)
    assert estimate.keys.shape == content.keys.shape and estimate.values.shape == content.values.shape
    assert estimate.keys.isfinite().all() and estimate.values.isfinite().all()


def test_constant_channels_do_no_harm(policy):
    def flat(tokens: int) -> KV:
        kv = random_kv(tokens)
        kv.keys[..., 0], kv.values[..., 1], kv.keys[:, 1] = 5.0, 0.0, -1e4
        return kv

    for tokens in (1, 6, 6):
        reference = flat(tokens)
        policy.observe(EDGE, reference, reference)
    content = flat(5)
    estimate = policy.correct(EDGE, content)
    assert estimate.keys.isfinite().all() and estimate.values.isfinite().all()
    assert largest_difference(estimate, content) <= 0.1 or not policy.traits.learns


def test_examples_of_other_tokens_are_refused(policy):
    if not policy.traits.learns:
        pytest.skip("learns nothing")
    with pytest.raises(ValueError, match="same tokens"):
        policy.observe(EDGE, random_kv(5), random_kv(6))


def test_forget_and_edges(policy):
    other = EDGE._replace(target="critic")
    teach(policy, 2)
    teach(policy, 1, edge=other)
    if not policy.traits.learns:
        assert policy.edges() == () and policy.state_bytes() == 0
        return
    assert policy.edges() == (EDGE, other)
    policy.correct(EDGE, random_kv(4))
    assert policy.edges() == (other, EDGE)
    assert policy.ready(EDGE).examples == 2 and policy.ready(EDGE).ready
    assert policy.state_bytes() == policy.state_bytes(EDGE) + policy.state_bytes(other) > 0
    policy.forget(EDGE)
    policy.forget(EDGE)
    assert policy.edges() == (other,) and policy.ready(EDGE).examples == 0


def test_the_least_recently_used_edge_makes_room(policy):
    if not policy.traits.learns:
        pytest.skip("keeps nothing")
    teach(policy, 1)
    small = create_policy(policy.name, max_bytes=int(2.5 * policy.state_bytes()))
    edges = [EDGE._replace(target=str(i)) for i in range(3)]
    for edge in edges:
        teach(small, 1, edge=edge)
    assert small.edges() == (edges[1], edges[2]) and small.state_bytes() <= small.max_bytes


@settings(max_examples=10, deadline=None)
@given(start=st.integers(0, 40), tokens=st.integers(1, 20), name=st.sampled_from(POLICY_NAMES))
def test_parts_are_corrected_like_the_whole_or_finitely_at_least(start, tokens, name):
    policy = create_policy(name)
    teach(policy, 3, tokens=60)
    estimate = policy.correct(EDGE, random_kv(tokens), start=start)
    assert estimate.keys.shape[2] == tokens and estimate.keys.isfinite().all() and estimate.values.isfinite().all()


@pytest.mark.parametrize("name", ["aligned", "cacheblend", "full_share"])
def test_what_only_moves_kv_returns_it_itself(name):
    content = random_kv(9)
    assert create_policy(name).correct(EDGE, content) is content


def test_a_policy_that_learns_nothing_is_one_override():
    class Faded(Policy):
        name = "faded"

        def correct(self, edge: Edge, reference: KV, start: int = 0) -> KV:
            return KV(reference.keys, reference.values / 2)

    policy, content = Faded(), random_kv(9)
    teach(policy, 2)
    policy.prepare(EDGE)
    policy.forget(EDGE)
    assert policy.ready(EDGE, content).ready and policy.ready(EDGE).examples == 0
    assert policy.edges() == () and policy.state_bytes() == policy.state_bytes(EDGE) == 0
    assert policy.correction(EDGE, content) is None and policy.select(content.keys[1], content.keys[1]) is None
    for layers, part in policy.estimates(EDGE, content, 0, Scratch()):
        assert largest_difference(part, KV(content.keys[layers], content.values[layers] / 2)) == 0


def test_the_package_and_the_registry_import_no_torch():
    code = (
        "import sys, kvcomm_integrations.reuse.policies, kvcomm_integrations.reuse.traits; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
