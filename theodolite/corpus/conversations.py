"""A conversation as the text that a model was trained on it as: by its tokenizer's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from theodolite.errors import UsageError, first_line

ROLES = {"human": "user", "gpt": "assistant"}
"""Of ShareGPT's rows, `{"from": "human", "value": …}`: what templates call them."""


def as_text(turns: Sequence[Any], tokenizer: Any, source: str) -> str:
    """A conversation in the chat template of a tokenizer.

    Without the token that the tokenizer puts before every sequence: a context gets it anyway.

    Args:
        turns: `{"role": …, "content": …}` each, or ShareGPT's `{"from": …, "value": …}`.
        source: where it stands, for errors.

    Raises:
        UsageError: it is no conversation, the tokenizer has no template, or the template refuses it.
    """
    messages = [_message(turn) for turn in turns]
    if not messages or None in messages:
        raise UsageError(
            f'{source} is neither text nor a conversation: give a text, or a list of {{"role": …, "content": …}}'
        )
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            f"{source} is a conversation, and the tokenizer has no chat template: give that of a model that chats, "
            "or a column of text"
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # whatever a template raises
        raise UsageError(f"{source}: the chat template refuses it ({first_line(error)})") from error
    before = next(iter(tokenizer("a", add_special_tokens=True, verbose=False)["input_ids"]))
    first = tokenizer.bos_token
    return text.removeprefix(first) if first and before == tokenizer.bos_token_id else text


def _message(turn: Any) -> dict[str, Any] | None:
    if not isinstance(turn, dict):
        return None
    if "role" in turn and "content" in turn:
        # Tables fill what is left out.
        return {name: value for name, value in turn.items() if value is not None}
    if "from" in turn and "value" in turn:
        return {"role": ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}
    return None
