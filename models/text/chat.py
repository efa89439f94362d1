"""The chat template of a checkpoint, which turns a user's message into a prompt of the form that the model was trained on.

A prompt equals the result of transformers' ``apply_chat_template``; neither transformers nor torch is needed.
Rendered text contains its special tokens, the begin-of-text token too: encode it with ``add_special_tokens=False``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from ..files import gguf as gguf_files
from ..files.directories import checkpoint_directory, locate_gguf, read_json
from . import jinja
from .tokenizer import special_tokens

# It has a line break, quotes, brackets, both cases and a backslash, to detect a template that changes any of them.
_MARK = 'Here stands\nwhat the <user> says: "it\'s & done" \\ 0x7F.'


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the special tokens that it can name.

    Attributes:
        template: Jinja text.
        special_tokens: the tokens by their names in templates, for example {"bos_token": "<s>"}.
    """

    template: str
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_directory(
        cls, directory: str | os.PathLike[str], name: str = "default", *, offline: bool = False
    ) -> ChatTemplate | None:
        """Read the template of a checkpoint from the files that transformers reads.

        ``chat_template.jinja`` and ``additional_chat_templates/<name>.jinja`` come before ``chat_template`` in
        ``tokenizer_config.json``, which can be a text or several named texts. A GGUF file holds templates in its metadata.

        Args:
            directory: a Hugging Face checkpoint directory, a GGUF file, a directory that holds one, or a name, see
                `checkpoint_directory`.
            name: name of the template, for checkpoints that have several.
            offline: whether to raise an error instead of downloading.

        Returns:
            The template, or None if the checkpoint has no template.

        Raises:
            FileNotFoundError: the directory does not exist.
            ValueError: the checkpoint has templates but none called ``name``, or a file is damaged.
        """
        path = locate_gguf(directory, offline=offline)
        if path is not None:
            file = gguf_files.open_file(path)
            templates, tokens = gguf_files.chat_templates(file), gguf_files.special_tokens(file)
        else:
            path = checkpoint_directory(directory, offline=offline)
            templates = _template_files(path) or _configured_templates(path / "tokenizer_config.json")
            tokens = special_tokens(path)
        if not templates:
            return None
        if name not in templates:
            raise ValueError(f"{path} has no chat template {name!r}, it has: {', '.join(sorted(templates))}")
        return cls(templates[name], tokens)

    @property
    def identity(self) -> str:
        """Twelve hexadecimal digits that identify the template in records."""
        return hashlib.sha256(self.template.encode()).hexdigest()[:12]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render a conversation as a prompt.

        Args:
            messages: each with "role" and "content".
            add_generation_prompt: whether to open the assistant's answer.
            continue_final_message: whether to leave the last message open, so that the model continues it.
            **variables: other variables of the template, for example ``enable_thinking=False`` (Qwen3) or
                ``date_string="26 Jul 2024"`` (Llama 3, whose prompt may otherwise contain the day of the run).

        Raises:
            ValueError: there are no messages, both flags are set, or the template refuses the conversation or fails.
        """
        if not messages:
            raise ValueError("messages must hold at least one message, got none")
        if add_generation_prompt and continue_final_message:
            raise ValueError("add_generation_prompt opens a new message and continue_final_message the last: choose one")
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return jinja.render(
                self.template,
                plain,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**self.special_tokens, **variables},
            )
        except TemplateError as error:
            roles = ", ".join(str(message.get("role")) for message in plain)
            raise ValueError(f"the chat template refuses a conversation of {roles}: {error}") from error
        except Exception as error:  # a template is a program; it can also ask for files by include, and none is given to it
            raise ValueError(f"the chat template cannot be rendered ({type(error).__name__}: {error})") from error

    def around(self, system: str | None = None, **variables: Any) -> tuple[str, str]:
        """Return the texts before and after a user message, for a message whose end is not known yet.

        A long context can be prefilled (and compressed) after the first text. Its question follows later, and after the
        question the second text, which opens the assistant's answer. No template can trim the user's message here.

        Args:
            system: the system message; None means the template's own.
            **variables: other variables of the template, see `render`.

        Returns:
            The text before the user's content, and the text after it.

        Raises:
            ValueError: the template changes, repeats or omits the user's message, or refuses a system message.
        """
        messages = [] if system is None else [{"role": "system", "content": system}]
        text = self.render([*messages, {"role": "user", "content": _MARK}], **variables)
        parts = text.split(_MARK)
        if len(parts) != 2:
            done = "changes it or leaves it out" if len(parts) == 1 else f"shows it {len(parts) - 1} times"
            raise ValueError(
                f"a chat template can be split only if it shows the user's content once, as it is; this one {done}: {text!r}"
            )
        return parts[0], parts[1]

    def between(self, system: str | None = None, **variables: Any) -> str:
        """Return the text between an answer and the next user message, for a conversation whose turns are not known yet.

        Args:
            system: see `around`.
            **variables: other variables of the template, see `render`.

        Returns:
            The text, which begins with the token that ends the answer.

        Raises:
            ValueError: the template changes, repeats or omits a message, or refuses the conversation.
        """
        said, asked = f"{_MARK} said", f"{_MARK} asked"
        messages = [] if system is None else [{"role": "system", "content": system}]
        turns = [("user", _MARK), ("assistant", said), ("user", asked)]
        text = self.render([*messages, *({"role": role, "content": content} for role, content in turns)], **variables)
        if (text.count(said), text.count(asked)) != (1, 1):
            raise ValueError(f"a conversation needs a template that shows each turn once, as it is; this one gives {text!r}")
        return text[text.index(said) + len(said) : text.index(asked)]


def _template_files(directory: Path) -> dict[str, str]:
    """Read the templates that have a file of their own, by name."""
    files = {path.stem: path for path in sorted(directory.glob("additional_chat_templates/*.jinja"))}
    if (directory / "chat_template.jinja").is_file():
        files["default"] = directory / "chat_template.jinja"
    templates = {}
    for name, path in files.items():
        try:
            text = path.read_bytes().decode("utf-8-sig")  # `read_text` gives "" for a part of a byte-order mark
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} must be a text in UTF-8: {error}") from error
        templates[name] = text.replace("\r\n", "\n").replace("\r", "\n")
    return templates


def _configured_templates(path: Path) -> dict[str, str]:
    """Read the templates in ``tokenizer_config.json``, by name."""
    templates = read_json(path).get("chat_template") if path.is_file() else None
    if templates is None or isinstance(templates, str):
        return {"default": templates} if templates else {}
    try:
        if isinstance(templates, list):
            templates = {entry["name"]: entry["template"] for entry in templates}
        if all(isinstance(text, str) for text in templates.values()):
            return dict(templates)
    except (AttributeError, KeyError, TypeError):
        pass
    raise ValueError(f"chat_template in {path} must be text or a list of names and templates")
