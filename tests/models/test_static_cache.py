"""A static KV cache against the model's own cache."""

import gc
from typing import Any
from weakref import ref

import pytest
import torch

transformers = pytest.importorskip("transformers")

from fedecho.tasks.text.gsm8k import static_cache  # noqa: E402

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 32, "head_dim": 4, "max_position_embeddings": 64}
PROMPTS = torch.arange(21).reshape(3, 7) % 40
MASK = torch.ones_like(PROMPTS)
MASK[0, :3] = 0
NEW = 9


def model_of(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    made: Any = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**{**SIZES, **more})).eval()
    made.generation_config = transformers.GenerationConfig()
    return made


def generated(model: Any, **cache: Any) -> Any:
    greedy = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None}
    told = {"output_logits": True, "return_dict_in_generate": True}
    with torch.no_grad():
        return model.generate(input_ids=PROMPTS, attention_mask=MASK, **greedy, **told, **cache)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_the_same_answers_from_memory_that_is_taken_once(kind: str) -> None:
    model = model_of(kind)
    cache = static_cache(model, PROMPTS.shape[1] + NEW)
    plain, ours = generated(model), generated(model, past_key_values=cache)
    assert torch.equal(plain.sequences, ours.sequences)
    for logits, expected in zip(ours.logits, plain.logits, strict=True):
        assert torch.equal(logits, expected)
    for layer in cache.layers:
        assert layer.keys.data_ptr() == layer.update.keys.data_ptr(), "a view of the preallocated memory, no copy"
        assert layer.get_seq_length() == PROMPTS.shape[1] + NEW - 1
        assert layer.update.keys.shape[-2] == PROMPTS.shape[1] + NEW


def test_the_memory_is_free_when_the_answers_are_there() -> None:
    """Not only when Python looks for circles: the next batch would take as much again."""
    model = model_of("Llama")
    cache = static_cache(model, PROMPTS.shape[1] + NEW)
    gc.disable()
    try:
        generated(model, past_key_values=cache)
        memories = [ref(layer.update.keys) for layer in cache.layers]
        assert all(memory() is not None for memory in memories)
        del cache
        assert all(memory() is None for memory in memories)
    finally:
        gc.enable()


def test_keys_and_values_may_be_of_two_precisions() -> None:
    """As they are where weights are float32 and products in bf16."""
    model = model_of("Llama")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = generated(model, past_key_values=static_cache(model, PROMPTS.shape[1] + NEW))
        assert torch.equal(ours.sequences, generated(model).sequences)


def test_another_kind_of_cache_is_the_models_own() -> None:
    assert static_cache(model_of("Mistral", sliding_window=4), 16) is None
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2))
    assert static_cache(mamba, 16) is None
