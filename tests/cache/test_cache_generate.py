"""`generate` through the bounded cache; the oracle is `use_cache=False`, a parallel forward per token."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from invariant_checks import retrofitted

from kvpop_lightning import BoundedCache
from kvpop_lightning.policy import Budget

NEW = 13  # with budget 13 and prompts of up to 17 tokens the cache turns over


@pytest.fixture(scope="module")
def model():
    model = retrofitted("llama", "mlstm_window")
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def prompts() -> dict[str, torch.Tensor]:
    """Three prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 272, (3, 17), generator=generator)
    mask = torch.ones(3, 17, dtype=torch.long)
    mask[1, :6] = 0
    mask[2, :14] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def generate(model, inputs, **options) -> torch.Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        return model.generate(**inputs, **({"max_new_tokens": NEW, "do_sample": False} | options))


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 20},
    "sampling_several": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "beams_several": {"num_beams": 4, "num_return_sequences": 2},
    "beam_sampling": {"num_beams": 2, "do_sample": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_equal_the_parallel_forward(model, prompts, mode: str) -> None:
    """Failures that peers report, number 1 and 4: true positions past the budget, harmless padding."""
    expected = generate(model, prompts, use_cache=False, **MODES[mode])
    cache = BoundedCache(model)
    assert torch.equal(generate(model, prompts, past_key_values=cache, **MODES[mode]), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1
    assert cache.layers[0].keys.shape[2] == model.kvpop.budget.total
    assert torch.equal(generate(model, prompts, **MODES[mode]), expected)  # without a cache one is made


def test_left_padded_batch_equals_one_by_one(model, prompts) -> None:
    """A failure that peers report, number 4."""
    together = generate(model, prompts)
    for row in range(3):
        length = int(prompts["attention_mask"][row].sum())
        alone = generate(model, {"input_ids": prompts["input_ids"][row : row + 1, -length:]})
        assert torch.equal(together[row, -NEW:], alone[0, -NEW:])


def test_results_do_not_depend_on_order(model, prompts) -> None:
    """A failure that peers report, number 3: one cache, reset between longer and shorter texts."""
    texts = [{"input_ids": prompts["input_ids"][0:1, :n]} for n in (17, 5, 11)]
    fresh = [generate(model, text, past_key_values=BoundedCache(model)) for text in texts]
    cache = BoundedCache(model)
    for index in (0, 1, 2, 0):
        cache.reset()
        assert torch.equal(generate(model, texts[index], past_key_values=cache), fresh[index])


def test_going_on_with_a_cache(model, prompts) -> None:
    """A second turn appended to a used cache equals the whole text at once."""
    ids = prompts["input_ids"][:1]
    cache = BoundedCache(model)
    first = generate(model, {"input_ids": ids}, past_key_values=cache)
    whole = torch.cat([first, ids[:, :9]], dim=1)
    second = generate(model, {"input_ids": whole}, past_key_values=cache)
    assert torch.equal(second, generate(model, {"input_ids": whole}, use_cache=False))


def test_rows_that_finish_early(model, prompts) -> None:
    """Finished rows go on with padding that nobody may notice in the others."""
    greedy = generate(model, prompts)
    eos = int(greedy[1, 17 + 3])
    expected = generate(model, prompts, use_cache=False, eos_token_id=eos)
    assert torch.equal(generate(model, prompts, eos_token_id=eos), expected)


def test_prefill_in_chunks(model, prompts) -> None:
    expected = generate(model, prompts, use_cache=False)
    for size in (4, 64):
        assert torch.equal(generate(model, prompts, prefill_chunk_size=size), expected)


@pytest.mark.parametrize("shape", [(3, 16), (3, 18), (2, 17)])
def test_mask_of_the_wrong_length(model, prompts, shape) -> None:
    """A failure that peers report, number 8."""
    with pytest.raises(ValueError):
        generate(
            model, {"input_ids": prompts["input_ids"], "attention_mask": torch.ones(shape, dtype=torch.long)}
        )
    with pytest.raises(ValueError, match="attention_mask must"):
        model(prompts["input_ids"], attention_mask=torch.ones(shape), past_key_values=BoundedCache(model))


def test_bytes_are_those_of_the_kv_heads(model, prompts) -> None:
    """Failures that peers report, number 5 and 6: two KV heads and B tokens are stored, not six heads."""
    policy = model.kvpop
    cache = BoundedCache(model)
    generate(model, prompts, past_key_values=cache)
    assert cache.layers[0].keys.shape == (3, 2, policy.budget.total, 16)
    assert cache.bytes_held() == 3 * policy.bytes_per_sequence(element_bytes=8, real_bytes=8)
    held = cache.bytes_held()
    generate(model, {"input_ids": torch.full((3, 90), 7)}, past_key_values=BoundedCache(model))
    cache.reset()
    generate(model, {"input_ids": torch.full((3, 90), 7)}, past_key_values=cache)
    assert cache.bytes_held() == held


def test_measured_bytes_equal_the_formula_in_float32() -> None:
    """Every scorer and input, at 4 bytes as run and at 2 as compared."""
    for name in (
        "linear",
        "mlp_hidden",
        "mlstm_window",
        "mlstm_0",
        "mlstm_hidden",
        "mlstm_kv_hidden",
        "random",
    ):
        model = retrofitted("qwen3", name, Budget(3, 6, 9), dtype=torch.float32)
        for first in (1, 40):
            cache = BoundedCache(model)
            with torch.no_grad():
                model(torch.full((1, first), 7), past_key_values=cache, use_cache=True)
            for element in (4, 2):
                assert cache.bytes_held(element_bytes=element) == model.kvpop.bytes_per_sequence(element), (
                    name
                )
            assert cache.bytes_held() == model.kvpop.bytes_per_sequence(4)


def test_cache_of_another_model(model, prompts) -> None:
    other = retrofitted("llama", "mlp")
    for wrong in (BoundedCache(other), BoundedCache(copy.deepcopy(model))):
        with pytest.raises(ValueError, match="made for another model or policy"):
            generate(model, prompts, past_key_values=wrong)


def test_prompt_lookup_is_refused(model, prompts) -> None:
    with pytest.raises(ValueError, match="cropped"):
        generate(model, {"input_ids": prompts["input_ids"][:1]}, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_generate_takes_the_cache_under_either_name(model, prompts, name: str) -> None:
    """The library's own generate warns of the older name, and older versions do not know the newer."""
    cache = BoundedCache(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        made = generate(model, prompts, **{name: cache})
    assert torch.equal(made, generate(model, prompts))
    assert cache.bytes_held() > 0
