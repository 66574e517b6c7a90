"""Prompts to token ids, without ever holding up the event loop.

Short texts are tokenised where they are (a few hundred microseconds at most, less than a thread
hop under load costs); long texts and chat templates go to a small pool of threads behind a
bounded queue. `Tokenizer.encode` lets other threads run while it works.
"""

from __future__ import annotations

import functools
import re
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from lightserve.errors import InvalidRequest, ModelLoadError
from lightserve.frontend.json_body import Backlog
from lightserve.messages.images import Image
from lightserve.models.vision_config import AS_WRITTEN, VisionConfig
from lightserve.tokenization.chat_template import ChatTemplate
from lightserve.tokenization.conversation import Conversation
from lightserve.tokenization.tokenizer import Spans, Tokenizer, find_infilling, known_families
from lightserve.turn_threads import TurnThreads

NUM_THREADS = 2
INLINE_SIZE = 2048
"""Characters, or bytes of token ids."""
NUM_ENDING_TOKENS = 16
"""Last tokens of a conversation, in which the tag of reasoning may be."""
_SHORT = "a"
_MARKS = re.compile(r"<[^<>]+>|\[[^][]+\]")
"""Special tokens in a text."""
BYTES_PER_ID = 8
"""Memory of an id in a list, without the number itself: most numbers are shared."""

T = TypeVar("T")


class EncodedChat(NamedTuple):
    """A conversation as the model reads it."""

    token_ids: array[int]
    num_marked: int
    """Tokens before the mark, if the conversation has one."""
    ending: str
    """The text of the last few: what the template wrote behind the last special token, if any."""
    images: tuple[Image, ...] = ()
    """Images, each of whose tokens is the place-holder."""


class PromptEncoder:
    """Turns every kind of prompt into checked token ids."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        vocab_size: int,
        max_model_len: int,
        vision: VisionConfig | None = None,
    ) -> None:
        """`vision`: the encoder of images; None: the model reads text alone.

        Raises:
            ModelLoadError: the tokenizer does not know the tokens of images.
        """
        self._vision = vision
        self._placeholder = None if vision is None else vision.placeholder
        self._shown = AS_WRITTEN if vision is None else vision.prompt
        self._break: int | None = None
        if vision is not None and self._shown.known:
            _, text, row_break, _ = self._shown
            known = tokenizer.encode(text, add_special_tokens=False)
            self._break = tokenizer.id_of(row_break) if row_break else None
            marks = _MARKS.findall(text + row_break)
            if known.count(vision.placeholder) != 1 or None in map(tokenizer.id_of, marks):
                raise ModelLoadError(
                    f"the tokenizer must have the tokens {''.join(marks)}, and"
                    f" {vision.placeholder} once among them"
                )
        self._bos = tokenizer.special_tokens.names.get("bos_token", "")
        self._own_texts: dict[str, tuple[int, ...]] = {}
        self._tokenizer = tokenizer
        self._template = template
        self.infilling = find_infilling(tokenizer)
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_text_bytes = max_model_len * tokenizer.longest_piece_bytes
        self._backlog = Backlog()
        self._threads = TurnThreads(NUM_THREADS, "encode")

    async def encode_text(
        self, text: str, *, param: str, keep: int | None = None, is_output: bool = False
    ) -> array[int]:
        """Return the ids of a text, with the model's BOS unless it is one of an output; the last
        `keep` of them.

        Raises:
            InvalidRequest: empty, not Unicode, or longer than the context could ever hold.
            RequestFailed: too many texts are waiting.
        """

        def encode() -> array[int]:
            token_ids = self._tokenizer.encode(text, add_special_tokens=not is_output)
            return self.check_ids(_last(token_ids, keep), param=param)

        if not text:
            raise InvalidRequest(f"{param} must not be empty", param=param)
        self._check_text(text, param)
        return await self.run(encode, size=len(text))

    async def encode_between(self, prefix: str, suffix: str) -> array[int]:
        """Return the ids of a prompt whose output belongs between two texts.

        Raises:
            InvalidRequest: the model has no tokens for it, or a text is not Unicode or too long.
            RequestFailed: too many texts are waiting.
        """
        infilling = self.infilling
        if infilling is None:
            raise InvalidRequest(
                "suffix needs a model for filling in the middle: this one's tokenizer has no three"
                f" tokens of {known_families()}",
                param="suffix",
            )
        self._check_text(prefix, "prompt")
        self._check_text(suffix, "suffix")

        def encode() -> array[int]:
            return self.check_ids(infilling.encode(prefix, suffix), param="prompt")

        return await self.run(encode, size=len(prefix) + len(suffix))

    async def encode_ids(
        self, token_ids: Sequence[int], *, param: str, keep: int | None = None
    ) -> array[int]:
        """Return the last `keep` ids if they can be a prompt.

        Raises as `check_ids`, and RequestFailed.
        """
        token_ids = _last(token_ids, keep)
        self._check_count(token_ids, param)  # before they wait: they hold more than their texts
        check = functools.partial(self.check_ids, token_ids, param=param)
        return await self.run(check, size=BYTES_PER_ID * len(token_ids))

    async def encode_input(
        self, given: str | Sequence[int], *, param: str, most: int, keep: int | None
    ) -> array[int]:
        """Return the ids of what a vector is wanted of, with the special tokens of a text.

        Args:
            given: a text, or ids as they are.
            param: what errors call it.
            most: so many tokens at most.
            keep: so many at the beginning are kept, of a text with the special tokens at its end.

        Raises:
            InvalidRequest: empty, not Unicode, too long, or beyond the vocabulary.
            RequestFailed: too much is waiting.
        """

        def check(token_ids: Sequence[int]) -> array[int]:
            _at_most(token_ids, param, most, "truncate_prompt_tokens")
            return self._in_vocabulary(token_ids, param)

        def encode() -> array[int]:
            token_ids = self._tokenizer.encode(text, add_special_tokens=True)
            if keep is not None and len(token_ids) > keep:
                ending = self._ending[: keep - 1]
                token_ids = [*token_ids[: keep - len(ending)], *ending]
            return check(token_ids)

        if not given:
            raise InvalidRequest(f"{param} must not be empty", param=param)
        if isinstance(given, str):
            text = given
            _num_bytes(text, param)  # as long as a body may be: encoders' tokenisers drop blanks
            return await self.run(encode, size=len(text))
        if keep is None and len(given) > most:
            return check(given)  # before it waits
        return await self.run(
            functools.partial(check, given[:keep]), size=BYTES_PER_ID * len(given)
        )

    async def encode_made(
        self, make: Callable[[Tokenizer], list[int]], *texts: str, param: str, most: int
    ) -> array[int]:
        """Return the ids that `make` makes of texts; errors as those of `encode_input`."""

        def encode() -> array[int]:
            return array("i", _at_most(make(self._tokenizer), param, most, "max_tokens_per_doc"))

        return await self.run(encode, size=sum(_num_bytes(text, param) for text in texts))

    @functools.cached_property
    def _ending(self) -> list[int]:
        """Tokens that the tokeniser puts behind every text."""
        empty, short = (
            self._tokenizer.encode(text, add_special_tokens=True) for text in ("", _SHORT)
        )
        num_before = _common_len(empty, short)
        return empty[num_before:]

    def tokens_of(self, text: str) -> tuple[int, ...]:
        """Return the ids of a short text of this server's within an output."""
        if text not in self._own_texts:
            self._own_texts[text] = tuple(self._tokenizer.encode_within(text))
        return self._own_texts[text]

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids. Raises RequestFailed: too many texts are waiting."""
        return await self.run(lambda: self._tokenizer.decode(token_ids), size=len(token_ids))

    async def encode_words(
        self, words: Sequence[str], *, param: str, max_tokens: int
    ) -> list[tuple[int, ...]]:
        """Return each way in which an output can have words: as it begins, behind a blank, within.

        Raises:
            InvalidRequest: not Unicode, or a word of more than `max_tokens`.
            RequestFailed: too many texts are waiting.
        """

        def encode() -> list[tuple[int, ...]]:
            ways: dict[tuple[int, ...], None] = {}
            for word in map(str.lstrip, words):
                self._check_text(word, param)
                for token_ids in (
                    self._tokenizer.encode(word, add_special_tokens=False),
                    self._tokenizer.encode(f" {word}", add_special_tokens=False),
                    self._tokenizer.encode_within(word),
                ):
                    if len(token_ids) > max_tokens:
                        raise InvalidRequest(
                            f"{param} must hold words of at most {max_tokens} tokens, got one of"
                            f" {len(token_ids)}",
                            param=param,
                        )
                    ways[tuple(token_ids)] = None
            return [way for way in ways if way]

        return await self.run(encode, size=3 * sum(map(len, words)))

    async def spans(self, text: str, *, param: str, add_special_tokens: bool) -> Spans:
        """Return the tokens of any text, also an empty one, with their places in it.

        Raises:
            InvalidRequest: not Unicode, or longer than the context could ever hold.
            RequestFailed: too many texts are waiting.
        """

        def split() -> Spans:
            return self._tokenizer.spans(text, add_special_tokens=add_special_tokens)

        self._check_text(text, param)
        return await self.run(split, size=len(text))

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template. Raises InvalidRequest: it has none."""
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        return self._template

    async def encode_chat(
        self,
        conversation: Callable[[], Conversation],
        *,
        size: int,
        keep: int | None = None,
        images: Sequence[Image] = (),
    ) -> EncodedChat:
        """Return the ids of a conversation, the last `keep` of them.

        `conversation` is called in a thread; `size` is that of everything that the template is
        given, in bytes; `images` are those of its messages, in order.

        Raises:
            InvalidRequest: the model has no chat template, the template refuses, the text is too
                long or names images otherwise, or whatever `conversation` finds.
            RequestFailed: too many texts are waiting.
        """
        template = self.template

        def encode() -> EncodedChat:
            known = conversation()
            for number, message in enumerate(known.messages):
                self._check_text(message.content, f"messages[{number}].content")
            template.check(known)
            text = template.render(known)
            self._check_text(text, "messages")
            # Templates of models that see images leave BOS to the processor.
            adds_bos = self._placeholder is not None and not text.startswith(self._bos)
            token_ids = self._encode_shown(text, adds_bos)
            self._check_placeholders(token_ids, len(images))
            whole, placed = self._with_images(token_ids, images)
            kept = self.check_ids(_last(whole, keep), param="messages")
            num_marked = 0
            if known.mark is not None:
                before = text[: template.marked_length(known, text)]
                marked = self._encode_shown(before, adds_bos)
                before_mark, _ = self._with_images(marked, images)
                num_marked = _common_len(before_mark, whole) - (len(whole) - len(kept))
            ending = self._ending_text(kept)
            return EncodedChat(kept, max(0, num_marked), ending, placed)

        return await self._in_thread(encode, size)

    def _encode_shown(self, text: str, adds_bos: bool) -> list[int]:
        """Return the ids of a template's text, with its images as the model knows them."""
        if self._shown.written:
            text = text.replace(self._shown.written, self._shown.known)
        return self._tokenizer.encode(text, add_special_tokens=adds_bos)

    def _check_placeholders(self, token_ids: Sequence[int], num_images: int) -> None:
        """Raise InvalidRequest unless a prompt has as many place-holders as images."""
        num_there = 0 if self._placeholder is None else token_ids.count(self._placeholder)
        if num_there == num_images:
            return
        if num_there < num_images:
            complaint = "have images that the model's chat template does not show"
        else:
            complaint = "must have no text that stands for an image to the model"
        raise InvalidRequest(
            f"messages {complaint}: the prompt has {num_there} places for images, the"
            f" messages have {num_images} images",
            param="messages",
            code="chat_template_error",
        )

    def _with_images(
        self, token_ids: Sequence[int], images: Sequence[Image]
    ) -> tuple[Sequence[int], tuple[Image, ...]]:
        """Return ids with a place-holder for each token of an image, and the images in place.

        `token_ids` has one for each image, or those of the first ones.
        """
        if not images:
            return token_ids, ()
        ids: list[int] = []
        placed: list[Image] = []
        for token_id in token_ids:
            if token_id == self._placeholder and len(placed) < len(images):
                placed.append(image := msgspec.structs.replace(images[len(placed)], start=len(ids)))
                own = [token_id] * image.num_tokens
                if self._break is not None and self._vision is not None:
                    columns = image.width // self._vision.factor
                    own[columns :: columns + 1] = [self._break] * (len(own) // (columns + 1))
                ids.extend(own)
            else:
                ids.append(token_id)
        return ids, tuple(placed)

    def _ending_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of the last few, but of none before the last without a text."""
        last = token_ids[-NUM_ENDING_TOKENS:]
        is_special = [self._tokenizer.is_special(token_id) for token_id in last]
        first = len(last) - is_special[::-1].index(True) if True in is_special else 0
        return self._tokenizer.decode(last[first:])

    def check_ids(self, token_ids: Sequence[int], *, param: str) -> array[int]:
        """Return the ids, in little memory, if they can be a prompt.

        Raises:
            InvalidRequest: none, too many for any output to follow, or outside the vocabulary.
        """
        self._check_count(token_ids, param)
        return self._in_vocabulary(token_ids, param)

    def _in_vocabulary(self, token_ids: Sequence[int], param: str) -> array[int]:
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self._vocab_size:
            raise InvalidRequest(
                f"{param} must hold token ids from 0 to {self._vocab_size - 1},"
                f" got {low if low < 0 else str(high)[:64]}",
                param=param,
            )
        return array("i", token_ids)

    def _check_count(self, token_ids: Sequence[int], param: str) -> None:
        if not token_ids:
            raise InvalidRequest(f"{param} must have at least one token, got 0", param=param)
        if len(token_ids) >= self._max_model_len:
            raise InvalidRequest(
                f"This model's maximum context length is {self._max_model_len} tokens, one of them"
                f" for the output: {param} must have at most {self._max_model_len - 1}, got"
                f" {len(token_ids)}",
                param=param,
                code="context_length_exceeded",
            )

    def close(self) -> None:
        """Let running work end; drop what waits."""
        self._threads.close()

    def _check_text(self, text: str, param: str) -> None:
        num_bytes = _num_bytes(text, param)
        if num_bytes > self._max_text_bytes:
            raise InvalidRequest(
                f"This model's maximum context length is {self._max_model_len} tokens, which hold"
                f" at most {self._max_text_bytes} bytes: {param} has {num_bytes}",
                param=param,
                code="context_length_exceeded",
            )

    async def run(self, work: Callable[[], T], *, size: int) -> T:
        """Do work on so many characters or bytes of ids, much of it in a thread.

        Raises:
            RequestFailed: too much is waiting.
        """
        if size <= INLINE_SIZE:
            return work()
        return await self._in_thread(work, size)

    async def _in_thread(self, work: Callable[[], T], size: int) -> T:
        return await self._backlog.in_thread(self._threads, work, size)


def _num_bytes(text: str, param: str) -> int:
    """Return how long a text is in UTF-8. Raises InvalidRequest: it is none."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"{param} holds half of a surrogate pair, which is not Unicode text", param=param
        ) from None


def _at_most(token_ids: Sequence[int], param: str, most: int, way: str) -> Sequence[int]:
    """Return ids that are at most so many. Raises InvalidRequest, which names a way there."""
    if len(token_ids) > most:
        raise InvalidRequest(
            f"This model's maximum context length is {most} tokens: {param} has"
            f" {len(token_ids)} ({way} would shorten it)",
            param=param,
            code="context_length_exceeded",
        )
    return token_ids


def _last(token_ids: Sequence[int], keep: int | None) -> Sequence[int]:
    """Return so many ids at the end; None: all of them."""
    return token_ids if keep is None else token_ids[-keep:]


def _common_len(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many ids at the beginning are the same."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))
