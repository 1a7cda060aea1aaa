"""The engine in process: what it samples is what transformers would, whatever else is in the batch."""

import asyncio
import random

import pytest
import torch
from rlcore.errors import ConfigError, PolicyUnavailable, Throttled
from rlcore.types import FinishReason, ModelRequest, RunContext, Sampling
from rlcore_engine.engine import EmbeddedEngine
from rlcore_engine.policy import EmbeddedPolicy
from rlcore_engine.testing import tiny_llama, tiny_model

pytestmark = pytest.mark.anyio
GREEDY = Sampling(temperature=0.0)
FAMILIES = ["llama", "qwen2", "gpt_neox"]


def prompts(count, *, seed=0, low=4, high=40):
    """Prompts of which some share a beginning."""
    numbers = random.Random(seed)
    shared = [numbers.randrange(3, 259) for _ in range(12)]
    made = []
    for index in range(count):
        tail = [numbers.randrange(3, 259) for _ in range(numbers.randrange(low, high))]
        made.append((shared if index % 2 else []) + tail)
    return made


@torch.no_grad()
def logprobs_of(model, prompt, out, temperature=1.0):
    logits = model(torch.tensor([[*prompt, *out]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(out)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_ids_and_logprobs_are_those_of_transformers(start, reference, family):
    model = reference(family)
    async with start(family) as engine:
        done = await asyncio.gather(*(engine.generate(p, max_tokens=12, sampling=GREEDY) for p in prompts(6)))
    for prompt, request in zip(prompts(6), done, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12, do_sample=False
        )[0, len(prompt) :].tolist()
        assert request.out == expected
        assert request.logprobs == pytest.approx(logprobs_of(model, prompt, request.out), abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
async def test_logprobs_are_of_the_tempered_distribution(start, reference, family):
    sampling = Sampling(temperature=0.7, seed=3)
    async with start(family) as engine:
        request = await engine.generate(prompts(1)[0], max_tokens=16, sampling=sampling)
    expected = logprobs_of(reference(family), request.prompt, request.out, 0.7)
    assert request.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_seeded_request_does_not_depend_on_the_others(start, family):
    async def run(engine, index):
        await asyncio.sleep(0.003 * (index % 4))
        sampling = Sampling(seed=index, temperature=1.0 if index % 3 else 0.5, top_p=0.9 if index % 2 else 1.0)
        return await engine.generate(prompts(10)[index], max_tokens=10, sampling=sampling)

    async with start(family, slots=4, chunk_tokens=16) as engine:
        together = await asyncio.gather(*(run(engine, index) for index in range(10)))
    async with start(family) as engine:
        alone = [await run(engine, index) for index in range(10)]
    assert [r.out for r in together] == [r.out for r in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


async def test_unseeded_requests_follow_the_seed_of_the_run(start):
    async def run(seed):
        async with start(seed=seed) as engine:
            return [(await engine.generate([5, 6, 7], max_tokens=12)).out for _ in range(2)]

    first, again, other = await run(0), await run(0), await run(1)
    assert first == again
    assert first[0] != first[1]
    assert first != other


async def test_shared_prompts_are_computed_once(start):
    prompt = prompts(1, low=30)[0]
    async with start() as engine:
        await asyncio.gather(*(engine.generate(prompt, max_tokens=2, sampling=Sampling(seed=i)) for i in range(8)))
        stats = engine.worker.stats
        assert stats.prompt_tokens == 8 * len(prompt)
        assert stats.prompt_tokens - stats.cached_tokens <= len(prompt) + 7


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_next_turn_reuses_what_the_last_one_left(start, reference, family):
    async with start(family) as engine:
        first = await engine.generate(prompts(1)[0], max_tokens=8, sampling=GREEDY, ignore_stops=True)
        following = [*first.tokens, 9, 8, 7]
        second = await engine.generate(following, max_tokens=8, sampling=GREEDY)
    assert second.cached == len(first.tokens) - 1
    assert second.logprobs == pytest.approx(logprobs_of(reference(family), following, second.out), abs=1e-4)


@pytest.mark.parametrize("chunk", [16, 512])
async def test_siblings_that_share_their_prompt_are_exact_whoever_ends_first(start, reference, until, chunk):
    model, numbers = reference(), random.Random(7)
    common = [numbers.randrange(3, 259) for _ in range(40)]
    family = [[*common, *tail] for tail in ([5] * 9, [5] * 9, [5] * 9, [6, 7], [6, 7], [8], [9, 10, 11])]
    async with start(chunk_tokens=chunk) as engine:
        tasks = [
            asyncio.create_task(
                engine.generate(
                    p, max_tokens=6 + 3 * i, sampling=Sampling(seed=i), ignore_stops=True, request_id=f"r{i}"
                )
            )
            for i, p in enumerate([*family, [12, 13]])
        ]
        await until(lambda: engine.worker.stats.generated_tokens > 16)
        assert sum(row.shared is not None for row in engine.worker.model._slots.rows) >= 4
        await engine.abort("r4")
        done = await asyncio.gather(*tasks)
        following = [[*request.tokens, 3] for request in done[:3]]
        done += await asyncio.gather(*(engine.generate(p, max_tokens=4, ignore_stops=True) for p in following))
    assert all(request.cached >= len(p) - 2 for request, p in zip(done[-3:], following, strict=True))
    for request in done:
        assert request.logprobs == pytest.approx(logprobs_of(model, request.prompt, request.out), abs=1e-4)


async def test_long_prompts_are_admitted_in_parts_and_siblings_together(start, monkeypatch):
    monkeypatch.setattr("rlcore_engine.worker.ADMIT_TOKENS", 64)
    many = [prompt for prompt in prompts(4, low=30) for _ in range(3)]
    async with start() as engine:
        sizes, prefill = [], engine.worker.model.prefill

        def counted(rows):
            sizes.append(len({tuple(row) for row in rows}))
            return prefill(rows)

        engine.worker.model.prefill = counted
        done = await asyncio.gather(*(engine.generate(p, max_tokens=3, sampling=GREEDY) for p in many))
    assert sum(sizes) == 4
    assert 1 < len(sizes) <= 4
    assert len({tuple(request.out) for request in done[:3]}) == 1


async def test_kept_prefixes_are_bounded(start):
    async with start(prefix_tokens=64) as engine:
        for prompt in prompts(8, seed=1):
            await engine.generate(prompt, max_tokens=4)
        assert 0 < engine.worker.model._prefixes.tokens <= 64


@pytest.mark.fault("MASK-10")
async def test_a_cut_answer_says_length_and_has_as_many_ids_as_logprobs(start):
    async with start() as engine:
        request = await engine.generate(prompts(1)[0], max_tokens=10, sampling=GREEDY, ignore_stops=True)
    assert request.finish is FinishReason.LENGTH
    assert (len(request.out), len(request.logprobs)) == (10, 10)


async def test_the_stop_id_is_the_last_id_and_has_its_logprob(start):
    async with start() as engine:
        free = await engine.generate(prompts(1)[0], max_tokens=10, sampling=GREEDY, ignore_stops=True)
        stop = free.out[4]
        request = await engine.generate(prompts(1)[0], max_tokens=10, sampling=GREEDY, stop_ids=[stop])
    assert request.finish is FinishReason.STOP
    assert request.matched == stop
    assert request.out == free.out[: free.out.index(stop) + 1]
    assert request.logprobs == pytest.approx(free.logprobs[: len(request.out)], abs=1e-5)


async def test_stop_ids_are_those_of_the_template_and_the_generation_config(start):
    async with start() as engine:
        assert engine._stop_ids == {2}


async def test_a_sequence_ends_where_the_context_ends(start):
    async with start(context_length=24) as engine:
        request = await engine.generate([5] * 20, max_tokens=100, sampling=GREEDY, ignore_stops=True)
        assert (request.finish, len(request.out)) == (FinishReason.LENGTH, 4)
        with pytest.raises(PolicyUnavailable, match="24 tokens"):
            await engine.generate([5] * 24, max_tokens=1)


@pytest.mark.parametrize("bad", [[], [259], [-1]])
async def test_bad_prompts_are_refused(start, bad):
    async with start() as engine:
        with pytest.raises(PolicyUnavailable):
            await engine.generate(bad, max_tokens=1)


async def test_a_full_queue_refuses(start):
    async with start(slots=1, queue=1, context_length=500) as engine:
        await engine.pause()
        tasks = [asyncio.create_task(engine.generate([5], max_tokens=1)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Throttled):
            await engine.generate([5], max_tokens=1)
        await engine.resume()
        await asyncio.gather(*tasks)


# --- ends before the end ----------------------------------------------------------------------------------------------


@pytest.mark.fault("CLI-01")
async def test_cancelled_calls_free_their_slots_at_once(start, until):
    async with start(slots=4) as engine:
        tasks = [
            asyncio.create_task(engine.generate([5 + i], max_tokens=400, ignore_stops=True, request_id=f"r{i}"))
            for i in range(8)
        ]
        await until(lambda: engine.worker.load() == (4, 4))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert await engine.running() == frozenset()
        await until(lambda: engine.worker.load() == (0, 0), 2.0)
        assert engine.worker.model.active == 0


@pytest.mark.fault("CLI-06")
async def test_an_aborted_answer_says_so_and_keeps_what_was_sampled(start, until):
    async with start() as engine:
        task = asyncio.create_task(engine.generate([5, 6], max_tokens=480, ignore_stops=True, request_id="a"))
        await until(lambda: engine.worker.stats.generated_tokens > 3)
        await engine.abort("a")
        request = await task
    assert request.finish is FinishReason.ABORT
    assert 3 < len(request.out) == len(request.logprobs) < 480


async def test_an_abort_reaches_a_request_that_waits_or_is_paused(start):
    async with start(slots=1) as engine:
        await engine.pause()
        task = asyncio.create_task(engine.generate([5], max_tokens=3, request_id="w"))
        await asyncio.sleep(0)
        await engine.abort("w")
        assert (await task).finish is FinishReason.ABORT


async def test_closing_ends_what_runs(start, until):
    async with start() as engine:
        task = asyncio.create_task(engine.generate([5], max_tokens=480, ignore_stops=True))
        await until(lambda: engine.worker.stats.generated_tokens > 0)
    assert (await task).finish is FinishReason.ABORT
    with pytest.raises(PolicyUnavailable):
        await engine.generate([5], max_tokens=1)


@pytest.mark.fault("CLI-13")
async def test_nothing_is_sampled_between_pause_and_resume_and_what_came_is_held(start, until):
    async with start() as engine:
        running = asyncio.create_task(engine.generate([5], max_tokens=60, sampling=GREEDY, ignore_stops=True))
        await until(lambda: engine.worker.stats.generated_tokens > 2)
        await engine.pause()
        before = engine.worker.stats.generated_tokens
        late = asyncio.create_task(engine.generate([6], max_tokens=3))
        await asyncio.sleep(0.05)
        assert engine.worker.stats.generated_tokens == before
        assert len(await engine.running()) == 2
        await engine.resume()
        assert len((await running).out) == 60
        assert (await late).out


@pytest.mark.parametrize("family", FAMILIES)
async def test_retracted_requests_go_on_from_their_tokens(start, until, family):
    async with start(family) as engine:
        whole = await engine.generate([5, 6], max_tokens=60, sampling=GREEDY, ignore_stops=True)
        task = asyncio.create_task(engine.generate([5, 6], max_tokens=60, sampling=GREEDY, ignore_stops=True))
        await until(lambda: engine.worker.stats.generated_tokens > 63)
        await engine.pause("retract")
        assert engine.worker.load() == (0, 1)
        await engine.flush()
        await engine.resume()
        assert (await task).out == whole.out


async def test_pause_by_abort_ends_what_runs_and_what_waits(start, until):
    async with start(slots=1) as engine:
        tasks = [asyncio.create_task(engine.generate([5], max_tokens=480, ignore_stops=True)) for _ in range(2)]
        await until(lambda: engine.worker.stats.generated_tokens > 0)
        await engine.pause("abort")
        assert [task.finish for task in await asyncio.gather(*tasks)] == [FinishReason.ABORT] * 2
        await engine.resume()


# --- weights ----------------------------------------------------------------------------------------------------------


def new_weights(engine, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in engine.worker.model.named_weights().items()
    }


@pytest.mark.fault("SYN-01")
@pytest.mark.parametrize("family", FAMILIES)
async def test_after_an_update_no_prefix_of_the_old_weights_is_used(start, reference, family):
    prompt = prompts(1)[0]
    async with start(family) as engine:
        await engine.generate(prompt, max_tokens=4, sampling=GREEDY)
        weights = new_weights(engine)
        await engine.pause()
        await engine.update_weights(7, weights.items())
        await engine.flush()
        await engine.resume()
        request = await engine.generate(prompt, max_tokens=8, sampling=GREEDY)
    assert request.cached == 0
    assert (engine.config.slots, request.versions) == (32, (7, 7))
    model = reference(family)
    model.load_state_dict(weights, strict=False)
    assert request.logprobs == pytest.approx(logprobs_of(model, prompt, request.out), abs=1e-4)


@pytest.mark.fault("SYN-01")
@pytest.mark.parametrize("family", FAMILIES)
async def test_what_ran_across_an_update_is_never_a_prefix(start, until, family):
    async with start(family) as engine:
        task = asyncio.create_task(engine.generate([5, 6, 7], max_tokens=100, ignore_stops=True))
        await until(lambda: engine.worker.stats.generated_tokens > 3)
        await engine.update_weights(1, new_weights(engine).items())
        beside = await engine.generate([5, 6, 7, 8], max_tokens=1)
        assert beside.cached == 0
        request = await task
        assert request.versions == (0, 1)
        after = await engine.generate([*request.tokens, 5], max_tokens=1)
        assert after.cached <= 4


@pytest.mark.fault("SYN-05")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fault", ["missing", "unexpected", "shape", "integers", "stream breaks"])
async def test_an_update_that_does_not_fit_changes_nothing(start, family, fault):
    async with start(family) as engine:
        before = {name: tensor.clone() for name, tensor in engine.worker.model.named_weights().items()}
        weights = new_weights(engine)
        name = list(weights)[-1]
        if fault == "missing":
            del weights[name]
        elif fault == "unexpected":
            weights["model.layers.9.weight"] = torch.zeros(3)
        elif fault == "shape":
            weights[name] = torch.zeros(1)
        elif fault == "integers":
            weights[name] = weights[name].long()

        def stream():
            for index, item in enumerate(weights.items()):
                if fault == "stream breaks" and index == 5:
                    raise PolicyUnavailable("lost")
                yield item

        with pytest.raises((ConfigError, PolicyUnavailable)):
            await engine.update_weights(1, stream())
        assert engine.version == 0
        after = engine.worker.model.named_weights()
        assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.fault("SYN-10")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_views_mixed_dtypes_and_tied_pairs_arrive_bit_for_bit(start, dtype):
    async with start(dtype=dtype) as engine:
        weights, expected = {}, {}
        for index, (name, tensor) in enumerate(new_weights(engine).items()):
            value = tensor.float().bfloat16() if index % 2 else tensor.float()
            weights[name] = value.t().contiguous().t() if value.dim() == 2 else value
            expected[name] = value.float() if "norm" in name else value.to(engine.worker.model.dtype)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        await engine.update_weights(1, weights.items())
        served = engine.worker.model.named_weights()
        assert served.keys() == expected.keys()
        assert all(torch.equal(served[name], expected[name]) for name in expected)
        weights["lm_head.weight"] = weights["lm_head.weight"] + 1
        with pytest.raises(ConfigError, match="tied"):
            await engine.update_weights(2, weights.items())


@pytest.mark.fault("MASK-17")
async def test_broken_weights_give_an_error_and_no_trace_of_it_stays(start):
    async with start() as engine:
        good = {name: tensor.clone() for name, tensor in engine.worker.model.named_weights().items()}
        before = await engine.generate([5, 6, 7], max_tokens=4, sampling=GREEDY)
        await engine.update_weights(1, [(name, tensor * torch.nan) for name, tensor in good.items()])
        with pytest.raises(PolicyUnavailable, match="not finite"):
            await engine.generate([5, 6, 7, 8, 9, 10, 11, 12], max_tokens=4)
        await engine.update_weights(2, good.items())
        both = await asyncio.gather(
            engine.generate([5, 6, 7], max_tokens=4, sampling=GREEDY),
            engine.generate([5, 6, 7, 8, 9, 10], max_tokens=4, sampling=GREEDY),
        )
        assert both[0].out == before.out


# --- the policy client ------------------------------------------------------------------------------------------------


def ask(prompt, **changes):
    fields = {"id": "r1", "session_id": "s", "max_tokens": 6, "sampling": Sampling(seed=1), "seconds": 30.0}
    return ModelRequest(**{**fields, "prompt_ids": prompt, **changes})


async def policy_of(engine, tmp_path):
    policy = EmbeddedPolicy(EmbeddedPolicy.Config())
    await policy.start(RunContext("run", tmp_path, 0, {}, engine))
    return policy


async def test_the_policy_gives_ids_logprobs_version_and_text(start, tmp_path):
    async with start() as engine:
        policy = await policy_of(engine, tmp_path)
        done = await policy.complete(ask([5, 6, 7]))
        assert len(done.token_ids) == len(done.logprobs) == done.completion_tokens
        assert all(logprob <= 0 for logprob in done.logprobs)
        assert (done.policy_version, done.min_policy_version, done.prompt_tokens) == (0, 0, 3)
        assert done.text == policy.renderer.decode(done.token_ids)
        assert await policy.running() == frozenset()
        await policy.aclose()


@pytest.mark.fault("CLI-01")
async def test_the_policy_stops_at_its_time_and_aborts(start, tmp_path, until):
    async with start() as engine:
        policy = await policy_of(engine, tmp_path)
        await engine.pause()
        with pytest.raises(PolicyUnavailable, match=r"within 0\.05 s"):
            await policy.complete(ask([5], seconds=0.05))
        assert await policy.running() == frozenset()
        await engine.resume()


@pytest.mark.fault("CLI-06")
async def test_the_policy_never_returns_an_aborted_answer(start, tmp_path):
    async with start() as engine:
        policy = await policy_of(engine, tmp_path)
        await engine.pause()
        task = asyncio.create_task(policy.complete(ask([5])))
        await asyncio.sleep(0)
        await policy.abort("r1")
        with pytest.raises(PolicyUnavailable, match="aborted"):
            await task


async def test_the_policy_needs_the_embedded_engine(tmp_path):
    policy = EmbeddedPolicy(EmbeddedPolicy.Config())
    with pytest.raises(ConfigError, match=r"engine\.name"):
        await policy.start(RunContext("run", tmp_path, 0, {}, None))


VARIANTS = {
    "untied": {"tie_word_embeddings": False},
    "one key head": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 32},
    "llama3 rotary": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "linear rotary": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
}


@pytest.mark.parametrize("variant", VARIANTS)
async def test_variants_of_the_family(start, reference, tmp_path, variant):
    folder = tiny_llama(tmp_path / "model", **VARIANTS[variant])
    async with start(folder, side="llama") as engine:
        for prompt in prompts(2, low=20):
            request = await engine.generate(prompt, max_tokens=6, sampling=GREEDY)
            assert request.logprobs == pytest.approx(logprobs_of(reference(folder), prompt, request.out), abs=1e-4)


async def test_a_checkpoint_in_parts_is_read_by_its_index(start, reference, tmp_path):
    from safetensors.torch import save_file

    folder = tiny_llama(tmp_path / "model")
    reference(folder).save_pretrained(folder, max_shard_size="50KB")
    (folder / "model.safetensors").unlink()
    save_file({"another.layout": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    async with start(folder, side="llama") as engine:
        request = await engine.generate([5, 6, 7], max_tokens=4, sampling=GREEDY)
        assert request.logprobs == pytest.approx(logprobs_of(reference(folder), [5, 6, 7], request.out), abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("damage", ["cut", "gone", "no config"])
async def test_a_broken_model_is_one_error_that_names_the_folder(start, tmp_path, family, damage):
    folder = tiny_model(tmp_path / "model", family)
    weights = folder / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "gone":
        weights.unlink()
    else:
        (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model\.path.*model"):
        async with start(folder):
            pass


async def test_the_fast_side_says_why_it_cannot_serve(start, models):
    with pytest.raises(ConfigError, match="gpt_neox"):
        async with start("gpt_neox", side="llama"):
            pass


@pytest.mark.parametrize("path", [None, "nowhere"])
async def test_a_model_that_is_not_there_is_named(tmp_path, path):
    engine = EmbeddedEngine(EmbeddedEngine.Config())
    with pytest.raises(ConfigError, match=r"model\.path"):
        await engine.start(RunContext("run", tmp_path, 0, {"path": path and str(tmp_path / path)}))


@pytest.mark.fault("SYN-07")
@pytest.mark.parametrize("updates_before_the_second", [0, 1])
async def test_clients_for_training_and_evaluation_both_see_every_version(start, tmp_path, updates_before_the_second):
    """Two clients on one engine, made in either order with an update: neither is left at an older version."""
    async with start() as engine:
        clients = [await policy_of(engine, tmp_path)]
        if updates_before_the_second:
            await engine.update_weights(5, new_weights(engine).items())
        clients.append(await policy_of(engine, tmp_path))
        if not updates_before_the_second:
            await engine.update_weights(5, new_weights(engine).items())
        versions = [(await client.complete(ask([5, 6], id=f"r{n}"))).policy_version for n, client in enumerate(clients)]
        assert versions == [5, 5]
        for client in clients:
            await client.aclose()


@pytest.mark.fault("SYN-09")
@pytest.mark.parametrize("family", FAMILIES)
async def test_aborts_in_any_order_with_an_update_end_what_they_name_and_nothing_else(start, until, family):
    """Aborted before the pause, while paused and after the update: the engine lives, the others go on."""
    async with start(family) as engine:
        tasks = {
            name: asyncio.create_task(engine.generate([5, 6], max_tokens=200, ignore_stops=True, request_id=name))
            for name in ("before", "paused", "after", "kept")
        }
        await until(lambda: engine.worker.stats.generated_tokens > 4)
        await engine.abort("before")
        await engine.pause()
        await engine.abort("paused")
        await engine.update_weights(1, new_weights(engine).items())
        await engine.flush()
        await engine.abort("after")
        await engine.resume()
        done = {name: await task for name, task in tasks.items()}
        assert {name: request.finish for name, request in done.items()} == {
            **dict.fromkeys(("before", "paused", "after"), FinishReason.ABORT),
            "kept": FinishReason.LENGTH,
        }
        assert len(done["kept"].out) == 200
        assert await engine.running() == frozenset()
        assert engine.version == 1
