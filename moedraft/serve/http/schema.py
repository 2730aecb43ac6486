"""The bodies that clients of the OpenAI-compatible routes may send. Unknown fields are refused by name.

Fields of OpenAI's API that we lack are accepted if their value has no effect (`presence_penalty: 0`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from moedraft.core import HOTTEST, MAX_LOGPROBS

MOST_FIELDS = 64  # for one object, since each unknown field would cause an error of its own
NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "parallel_tool_calls": (None,),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "prompt_cache_retention": (None,),
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
NEUTRAL_OF_MESSAGE: dict[str, tuple[object, ...]] = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "name": (None,),
    "refusal": (None,),
    "tool_calls": (None, []),
}

MOST_PARTS = 4096  # prompts of a request, messages of a conversation

Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_PARTS, fail_fast=True)]
TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]
SeveralIds = Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_PARTS, fail_fast=True)]


class Strict(BaseModel):
    """Base of request bodies: no type coercion, no unknown fields, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > MOST_FIELDS:
            raise ValueError(f"an object has at most {MOST_FIELDS} fields")
        return data


class StreamOptions(Strict):
    include_usage: bool | None = Field(None, description="send the token counts in a last chunk")
    include_obfuscation: Literal[False] | None = None


class Generation(Strict):
    """What both kinds of requests have. `top_k`, `min_p`, `ignore_eos` and `draft` are ours."""

    model: str = Field(min_length=1, max_length=512, description="the target, or `target:domain`")
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=HOTTEST, description="default 1; 0 is greedy")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31, description="0 switches it off")
    min_p: float | None = Field(None, ge=0, le=1, description="0 switches it off")
    n: int | None = Field(None, ge=1, lt=2**31, description="answers to each prompt")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="answer i of n uses seed + i")
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    draft: bool | None = Field(None, description="false: plain decoding, for comparison")
    store: bool | None = Field(None, description="false: nothing of this request is kept to learn from")
    user: str | None = Field(None, description="taken and not looked at, as the next two")
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, data: Any) -> Any:
        return without(data, NEUTRAL)


class CompletionRequest(Generation):
    prompt: str | TokenIds | Texts | SeveralIds
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="alternatives at each token")


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, data: Any) -> Any:
        return without(data, NEUTRAL_OF_MESSAGE)

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


def _few_parts(messages: Any) -> Any:
    """`messages` itself, unless they have too many parts: each part is an object of its own."""
    rows = [row for row in messages if isinstance(row, dict)] if isinstance(messages, list) else []
    contents = [row.get("content") for row in rows]
    if sum(len(content) for content in contents if isinstance(content, list)) > MOST_PARTS:
        raise ValueError(f"the messages have at most {MOST_PARTS} parts together")
    return messages


class ChatRequest(Generation):
    messages: Annotated[
        list[ChatMessage],
        Field(min_length=1, max_length=MOST_PARTS, fail_fast=True),
        BeforeValidator(_few_parts),
    ]
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="the newer max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


class Card(BaseModel):
    """A row of what the server says about itself."""

    model_config = ConfigDict(frozen=True)


class ModelCard(Card):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "moedraft"
    parent: str | None = None  # of a domain: the target


class ModelList(Card):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(Card):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Card):
    error: ErrorDetail


def without(data: Any, neutral: dict[str, tuple[object, ...]]) -> Any:
    """`data` without the fields whose value has no effect."""
    if not isinstance(data, dict) or len(data) > MOST_FIELDS:
        return data  # refused by `Strict`, or by its type

    def changes(name: object, value: object) -> bool:
        return not (isinstance(name, str) and name in neutral and value in neutral[name])

    return {name: value for name, value in data.items() if changes(name, value)}
