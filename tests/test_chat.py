"""Prompts go through the chat template of a model that has one, where they are meant as a user's message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from moedraft.chat import asked_text, has_template, message_ids, prompt_ids
from moedraft.config import load_settings
from moedraft.core import InvalidRequest, SamplingParams
from moedraft.drafting.drafter import NoDrafter
from moedraft.engine.engine import Engine
from moedraft.models import load_tokenizer
from moedraft.routing.selector import FixedSelector

from gguf_files import TEMPLATE
from tiny import TinyLM, random_table

WORDS = ["<|im_start|>", "<|im_end|>", "user", "assistant", "red", "blue", "\n"]


def word_tokenizer(template: str | None = TEMPLATE) -> Any:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="red"))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"additional_special_tokens": WORDS[:2]})
    tokenizer.chat_template = template
    return tokenizer


def engine_with(tokenizer: Any) -> Engine:
    return Engine(TinyLM(random_table(len(tokenizer), 1)), tokenizer, NoDrafter(), FixedSelector())


def test_a_message_ends_where_the_assistant_begins() -> None:
    tokenizer = word_tokenizer()
    ids = prompt_ids(tokenizer, "blue", chat=True)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "blue"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered == "<|im_start|>user\nblue<|im_end|>\n<|im_start|>assistant\n"
    assert ids == list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    assert prompt_ids(tokenizer, "blue", chat=False) == [5]


def test_without_a_template_a_prompt_is_itself() -> None:
    tokenizer = word_tokenizer(None)
    assert not has_template(tokenizer)
    assert prompt_ids(tokenizer, "red blue", chat=True) == [4, 5]


def test_a_template_may_refuse() -> None:
    tokenizer = word_tokenizer("{{ raise_exception('never') }}")
    with pytest.raises(InvalidRequest, match="chat template"):
        message_ids(tokenizer, [{"role": "user", "content": "blue"}])


def test_the_engine_reads_a_message_and_routes_by_its_words() -> None:
    tokenizer = word_tokenizer()
    engine = engine_with(tokenizer)
    engine.add("blue", request_id="raw")
    engine.add("blue", request_id="chat", chat=True)
    engine.add([4, 5], request_id="ids", chat=True, topic="the question")
    found = {row.request_id: row for row in engine.sequences}
    assert found["raw"].token_ids == [5]
    assert found["chat"].token_ids == prompt_ids(tokenizer, "blue", chat=True)
    assert found["ids"].token_ids == [4, 5]
    assert [found[name].prompt for name in ("raw", "chat", "ids")] == ["blue", "blue", "the question"]


@torch.inference_mode()
def test_whole_answers_take_the_same_way() -> None:
    tokenizer = word_tokenizer()
    engine = engine_with(tokenizer)
    params = SamplingParams(max_tokens=5)
    [asked] = engine.generate("blue", params, chat=True)
    [given] = engine.generate([prompt_ids(tokenizer, "blue", chat=True)], params)
    [raw] = engine.generate("blue", params)
    assert asked.token_ids == given.token_ids
    assert asked.num_prompt_tokens == given.num_prompt_tokens != raw.num_prompt_tokens
    assert [*engine.stream("blue", params, chat=True)][-1].token_ids == asked.token_ids


LLAMA = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n" + TEMPLATE


@pytest.fixture(scope="module")
def letters() -> Any:
    """The embedded pair's tokenizer, which can write any text."""
    return load_tokenizer(load_settings(target="mini"))


@pytest.mark.parametrize("template", [TEMPLATE, SYSTEM, LLAMA])
@pytest.mark.parametrize("asked", ["Größe?", "two\nlines, user: really", "[INST] inside"])
def test_what_was_asked_is_read_back_from_tokens(letters: Any, template: str, asked: str) -> None:
    letters.chat_template = template
    if asked in template or (template == LLAMA and "[INST]" in asked):
        asked = "anything else"  # what imitates the template cannot be told from it
    talk = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "yes"}]
    for before in ([], talk):
        ids = message_ids(letters, [*before, {"role": "user", "content": asked}])
        assert asked_text(letters, ids) == asked


def test_without_marks_the_whole_text_was_asked(letters: Any) -> None:
    letters.chat_template = None
    assert asked_text(letters, letters("plain text ")["input_ids"]) == "plain text"
    letters.chat_template = "{{ raise_exception('never') }}"
    assert asked_text(letters, letters("plain text")["input_ids"]) == "plain text"


def test_a_missing_tokenizer_is_named(tmp_path: Any) -> None:
    with pytest.raises(InvalidRequest, match="tokenizer of"):
        load_tokenizer(load_settings(target=str(tmp_path)))
