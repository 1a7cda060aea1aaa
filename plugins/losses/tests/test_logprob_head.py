"""The head against plain log_softmax: values, gradients, memory, split vocabularies."""

import json
import subprocess
import sys
import threading

import pytest
import torch
from rlcore_losses.logprob_head import VocabShard, fused_loss, selective_logprobs


def draw(count=50, width=8, vocabulary=33, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (count,), generator=generator)
    slopes = torch.randn(2, count, generator=generator)
    return hidden, weight, targets, slopes


def plain(hidden, weight, targets, temperature):
    """float64 all the way."""
    logits = (hidden.double() if weight is None else hidden.double() @ weight.double().T) / temperature
    every = torch.log_softmax(logits, -1)
    return every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 7, 50, None])
@pytest.mark.parametrize("from_logits", [False, True])
def test_values_and_gradients_are_exact(temperature, chunk, from_logits):
    hidden, weight, targets, slopes = draw(width=33 if from_logits else 8)
    weight = None if from_logits else weight
    leaves = [hidden] if from_logits else [hidden, weight]
    logprobs, entropy = selective_logprobs(hidden, weight, targets, temperature, chunk, entropy=True)
    wanted, wanted_entropy = plain(hidden, weight, targets, temperature)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad((logprobs * slopes[0]).sum() + (entropy * slopes[1]).sum(), leaves)
    right = torch.autograd.grad((wanted * slopes[0]).sum() + (wanted_entropy * slopes[1]).sum(), leaves)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    without = selective_logprobs(hidden, weight, targets, temperature, chunk)
    assert without.equal(logprobs)
    found = torch.autograd.grad((without * slopes[0]).sum(), leaves)
    right = torch.autograd.grad((plain(hidden, weight, targets, temperature)[0] * slopes[0]).sum(), leaves)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize("from_logits", [False, True])
def test_the_fused_loss_is_the_general_one(temperature, chunk, from_logits):
    hidden, weight, targets, slopes = draw(width=33 if from_logits else 8)
    weight = None if from_logits else weight
    leaves = [hidden] if from_logits else [hidden, weight]
    loss, logprobs = fused_loss(
        hidden, weight, targets, lambda lp, part: (lp.exp() * slopes[0][part]).sum(), temperature, chunk
    )
    wanted, _ = plain(hidden, weight, targets, temperature)
    right = (wanted.exp() * slopes[0]).sum()
    assert not logprobs.requires_grad
    torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss.double(), right, rtol=1e-5, atol=1e-6)
    for a, b in zip(torch.autograd.grad(3 * loss, leaves), torch.autograd.grad(3 * right, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_fused_chunk_without_gradient_gets_zeros():
    hidden, weight, targets, _ = draw(20)
    loss, _ = fused_loss(hidden, weight, targets, lambda lp, part: lp.sum() * (part.start == 0), chunk=10)
    loss.backward()
    assert hidden.grad[:10].abs().sum() > 0
    assert not hidden.grad[10:].any()
    constant, _ = fused_loss(hidden, weight, targets, lambda lp, part: lp.detach().sum(), chunk=10)
    hidden.grad = None
    constant.backward()
    assert not hidden.grad.any()


def test_bfloat16_inputs_are_multiplied_in_float32():
    hidden, weight, targets, slopes = draw(dtype=torch.bfloat16)
    logprobs = selective_logprobs(hidden, weight, targets, chunk=7)
    torch.testing.assert_close(logprobs.double(), plain(hidden, weight, targets, 1.0)[0], rtol=1e-5, atol=1e-6)
    (logprobs * slopes[0]).sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    right = torch.autograd.grad((plain(hidden, weight, targets, 1.0)[0] * slopes[0]).sum(), [hidden, weight])
    torch.testing.assert_close(hidden.grad, right[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(weight.grad, right[1], rtol=2e-2, atol=2e-2)


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e4, 0.0, -1e4], [-1e4, -1e4, -1e4], [3e38, 0.0, 0.0]], requires_grad=True)
    logprobs, entropy = selective_logprobs(logits, None, torch.tensor([2, 1, 0]), entropy=True)
    assert logprobs.tolist() == pytest.approx([-2e4, -1.0986123, 0.0])
    (logprobs.sum() + entropy.sum()).backward()
    assert logits.grad.isfinite().all()


@pytest.mark.fault("LOSS-04")
def test_no_tokens_give_zero_gradients():
    hidden, weight, targets, _ = draw(0)
    for loss in (
        selective_logprobs(hidden, weight, targets).sum(),
        fused_loss(hidden, weight, targets, lambda lp, part: lp.sum())[0],
    ):
        hidden.grad = weight.grad = None
        loss.backward()
        assert hidden.grad.shape == (0, 8)
        assert not weight.grad.any()


def test_frozen_inputs_get_no_gradient():
    hidden, weight, targets, slopes = draw()
    for frozen in (hidden, weight):
        hidden.grad = weight.grad = None
        frozen.requires_grad_(False)
        (selective_logprobs(hidden, weight, targets) * slopes[0]).sum().backward()
        assert frozen.grad is None
        frozen.requires_grad_(True)


@pytest.mark.parametrize(
    ("hidden", "weight", "targets", "temperature", "message"),
    [
        ((5, 8), (33, 8), (6,), 1.0, r"hidden \[5, 8\] and targets \[6\]"),
        ((5, 8), (33, 9), (5,), 1.0, r"hidden \[5, 8\] and weight \[33, 9\]"),
        ((5, 8), (33, 8), (5,), 0.0, "temperature must be > 0, got 0"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(hidden, weight, targets, temperature, message):
    arguments = (torch.zeros(hidden), torch.zeros(weight), torch.zeros(targets, dtype=torch.long))
    with pytest.raises(ValueError, match=message):
        selective_logprobs(*arguments, temperature)
    with pytest.raises(ValueError, match=message):
        fused_loss(*arguments, lambda lp, part: lp.sum(), temperature)


class Ranks:
    """Ranks as threads that meet at every call and note what they called."""

    def __init__(self, count):
        self.barrier, self.values, self.calls = threading.Barrier(count), [None] * count, [[] for _ in range(count)]

    def shard(self, rank, start, largest):
        def reduce(name, join):
            def run(values):
                self.calls[rank].append((name, tuple(values.shape)))
                self.values[rank] = values
                self.barrier.wait(20)
                result = join(torch.stack(self.values), 0)
                self.barrier.wait(20)
                return result

            return run

        return VocabShard(start, largest, reduce("max", torch.amax), reduce("sum", torch.sum))


@pytest.mark.fault("LOSS-27")
@pytest.mark.parametrize("fused", [False, True])
def test_a_split_vocabulary_gives_the_same_and_every_rank_makes_the_same_calls(fused):
    hidden, weight, targets, slopes = draw()
    targets = targets.clamp(max=19)  # no target is on the last rank: it must call all the same
    bounds, found = [0, 15, 20, 33], [None] * 3
    ranks = Ranks(3)

    def work(rank):
        torch.set_num_threads(1)
        local = weight.detach()[bounds[rank] : bounds[rank + 1]].clone().requires_grad_()
        own = hidden.detach().clone().requires_grad_()
        shard = ranks.shard(rank, bounds[rank], 15)
        if fused:
            loss, logprobs = fused_loss(own, local, targets, lambda lp, p: (lp * slopes[0][p]).sum(), 0.7, 9, shard)
            entropy = None
        else:
            logprobs, entropy = selective_logprobs(own, local, targets, 0.7, 9, True, shard)
            loss = (logprobs * slopes[0]).sum() + (entropy * slopes[1]).sum()
        found[rank] = logprobs.detach(), entropy, *torch.autograd.grad(loss, [own, local])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(found), "a rank did not finish"
    assert ranks.calls[0] == ranks.calls[1] == ranks.calls[2]
    wanted, wanted_entropy = plain(hidden, weight, targets, 0.7)
    right = (wanted * slopes[0]).sum() + (0 if fused else (wanted_entropy * slopes[1]).sum())
    grad_hidden, grad_weight = torch.autograd.grad(right, [hidden, weight])
    for rank, (logprobs, entropy, by_hidden, by_weight) in enumerate(found):
        torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-5, atol=1e-5)
        if entropy is not None:
            torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(by_hidden, grad_hidden, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(by_weight, grad_weight[bounds[rank] : bounds[rank + 1]], rtol=1e-4, atol=1e-5)


RANK = """
import json, sys, torch
from rlcore_losses.logprob_head import VocabShard, selective_logprobs
rank, path = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=2)
hidden, weight, targets, slopes = torch.load(f"{path}/inputs.pt")
bounds = [0, 20, 33]
shard = VocabShard.of_group(torch.distributed.group.WORLD, bounds[rank], 20)
local = weight[bounds[rank] : bounds[rank + 1]].clone().requires_grad_()
hidden.requires_grad_()
logprobs = selective_logprobs(hidden, local, targets, shard=shard, chunk=9)
(logprobs * slopes[0]).sum().backward()
print(json.dumps([logprobs.tolist(), hidden.grad.tolist(), local.grad.tolist()]))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_a_split_vocabulary_over_real_processes(tmp_path):
    hidden, weight, targets, slopes = draw()
    torch.save((hidden.detach(), weight.detach(), targets, slopes), tmp_path / "inputs.pt")
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True) for rank in range(2)
    ]
    try:
        found = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(30)
    wanted, _ = plain(hidden, weight, targets, 1.0)
    right = torch.autograd.grad((wanted * slopes[0]).sum(), [hidden, weight])
    for logprobs, by_hidden, _ in found:
        torch.testing.assert_close(torch.tensor(logprobs).double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.tensor(by_hidden), right[0], rtol=1e-4, atol=1e-5)
    by_weight = torch.tensor([row for _, _, rows in found for row in rows])
    torch.testing.assert_close(by_weight, right[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_no_tensor_of_all_rows_and_the_whole_vocabulary_is_made(fused):
    """Every tensor that an operation makes is watched."""
    from torch.utils._python_dispatch import TorchDispatchMode

    count, vocabulary = 64, 1000
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            sizes.extend(
                r.numel() for r in (result if isinstance(result, tuple) else (result,)) if isinstance(r, torch.Tensor)
            )
            return result

    hidden, weight, targets, slopes = draw(count, 4, vocabulary)
    with Watch():
        if fused:
            fused_loss(hidden, weight, targets, lambda lp, p: (lp * slopes[0][p]).sum(), chunk=8)[0].backward()
        else:
            (selective_logprobs(hidden, weight, targets, chunk=8) * slopes[0]).sum().backward()
    assert max(sizes) <= 8 * vocabulary
    assert hidden.grad.any()
