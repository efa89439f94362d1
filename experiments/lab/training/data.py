"""Training batches: task documents, tokenised exactly as inference sees them, made by worker processes.

A row is `context, question 1, answer 1, <eos>, question 2, ...`, from position 0, padded on the right, with the texts of a
chat template between the parts (`experiments.lab.training.mixture.Form`). Context, question with prefix, and answer are
encoded
apart and concatenated, because inference generates the answer token by token after the encoded prompt. A batch depends on
(seed, step) only, not on the number of workers.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import multiprocessing
import os
import pathlib
import random
import signal
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from experiments.benchmarks import end_with_parent, held_interrupts
from experiments.lab.training.course import Course
from experiments.lab.training.mixture import COPY, PROSE, ROW_TASKS, SHORTEST, Mixture
from experiments.tasks import TASKS, Haystack, Request, Words, load_haystack, make_document

LM_ROLE = 1  # role of a token with language-model loss
COPY_LENGTHS = 1024  # tokens; copy rows are many in buckets up to this length and few in longer ones
FIRST_QUESTION_ROLE = 2  # answer tokens of question i have role 2 + i
SINGLE_QUESTION_SHARE = 0.35
FULL_LENGTH_SHARE = 0.5
_DEPTH = 8  # batches that each worker may be ahead


@dataclasses.dataclass
class Row:
    """A tokenised row.

    Attributes:
        task: index into `ROW_TASKS`.
        tokens: token ids.
        roles: a role for each token: 0 for no loss, `LM_ROLE`, or `FIRST_QUESTION_ROLE` + question.
    """

    task: int
    tokens: list[int]
    roles: list[int]


@dataclasses.dataclass
class Batch:
    """A batch of R rows of T tokens.

    Attributes:
        tokens: uint16 [R, T], padded on the right.
        roles: uint16 [R, T], see `Row.roles`; 0 on padding.
        tasks: int32 [R], index into `ROW_TASKS`.
    """

    tokens: np.ndarray
    roles: np.ndarray
    tasks: np.ndarray


class RowMaker:
    """Makes rows from the training split.

    Args:
        tokenizer_file: the model's tokenizer.json.
        texts: prose files besides `pydoc_data.topics`; half of the prose haystacks come from these files.
        mixture: what rows are made of.
        split: "train", or "eval" to measure the held-out loss.
    """

    def __init__(
        self, tokenizer_file: pathlib.Path, texts: Sequence[pathlib.Path], mixture: Mixture, split: str = "train"
    ) -> None:
        self.mixture = mixture
        self.tokenizer = Tokenizer.from_buffer(tokenizer_file.read_bytes())
        self.words = Words(split)
        self.noise = load_haystack("noise", self.count, split)
        self.builtin_prose = load_haystack(PROSE, self.count, split)
        self.books = [load_haystack(f"file:{path}", self.count, split) for path in texts]
        self._sizes = [len(book.sentences) for book in self.books]
        form = mixture.form  # tokens of the texts around the parts, which the tasks do not count
        self._fixed = self.count(form.opening) + self.count(form.answering)
        self._between = self.count(form.asking) + self.count(form.answering)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text as token ids; no special tokens are added."""
        return [e.ids for e in self.tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def count(self, text: str) -> int:
        """Count the tokens of a text."""
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def prose(self, rng: random.Random) -> Haystack:
        """Draw the built-in prose or a book, with equal chances; a longer book is drawn more often."""
        if not self.books or rng.random() < 0.5:
            return self.builtin_prose
        return rng.choices(self.books, self._sizes)[0]

    def row(self, rng: random.Random, task: str, length: int, num_questions: int) -> Row:
        """Make a row of at most ``length`` tokens.

        Args:
            rng: source of randomness.
            task: a name of `ROW_TASKS`.
            length: upper limit in tokens.
            num_questions: questions about the context; the row has fewer if they do not fit.

        Returns:
            The row.

        Raises:
            ValueError: not even a single question fits.
        """
        if task == COPY:
            return self._copy_row(rng, length)
        if task == PROSE:
            sentences = self.prose(rng).span(rng, length - 1)
            ids = self.encode([" ".join(sentences)])[0][:length]
            return Row(ROW_TASKS.index(task), ids, [0] + [LM_ROLE] * (len(ids) - 1))
        recipe, form = self.mixture.recipes[task], self.mixture.form
        use_prose = TASKS[task].haystack == PROSE or rng.random() < recipe.prose_share
        haystack = self.prose(rng) if use_prose else self.noise
        limit = length - self._fixed - (num_questions - 1) * self._between
        while True:
            try:
                document = make_document(
                    Request(task, rng, limit, self.count, haystack, self.words, None, num_questions, training=True)
                )
            except ValueError:
                if num_questions == 1:
                    raise
                num_questions = max(1, num_questions * 2 // 3)
                limit = length - self._fixed - (num_questions - 1) * self._between
                continue
            texts = [form.opening + document.context]
            for index, question in enumerate(document.questions):
                asking = form.asking if index else ""
                texts += [asking + question.question + form.answering + question.answer_prefix, question.target]
            context, *rest = self.encode(texts)
            tokens = list(context)
            # Only contexts of natural prose have language-model loss; noise, needles and uuids cannot be predicted.
            roles = [LM_ROLE if use_prose and self.mixture.lm_everywhere else 0] * len(context)
            roles[0] = 0
            for index in range(len(document.questions)):
                asked, answer = rest[2 * index], rest[2 * index + 1] + [form.end]
                if len(tokens) + len(asked) + len(answer) > length:
                    break
                tokens += asked + answer
                # A question repeats its key at a short distance, where copying is easiest to learn.
                asked_role = LM_ROLE if self.mixture.lm_everywhere else 0
                roles += [asked_role] * len(asked) + [FIRST_QUESTION_ROLE + index] * len(answer)
            if len(tokens) > len(context):
                return Row(ROW_TASKS.index(task), tokens, roles)
            limit -= 16

    def _copy_row(self, rng: random.Random, length: int) -> Row:
        """Draw random tokens in segments, then repeat the segments in another order.

        All tokens of the repeated segments count, except the first two of each.
        Half of all tokens teach the induction circuit that every retrieval task is built on. Without such rows, and without
        loss on questions, the circuit had not formed after 2,000 steps; with both, it forms after about 1,000.
        """
        vocabulary = self.tokenizer.get_vocab_size()
        segments: list[list[int]] = []
        total = 0
        while total < (length - 1) // 2:
            size = min(rng.randint(4, 24), (length - 1) // 2 - total)
            segments.append([rng.randrange(2, vocabulary) for _ in range(size)])
            total += size
        tokens = [token for segment in segments for token in segment]
        roles = [0] * len(tokens)
        rng.shuffle(segments)
        for index, segment in enumerate(segments):
            tokens += segment
            roles += [0] * len(segment[:2]) + [FIRST_QUESTION_ROLE + index] * len(segment[2:])
        return Row(ROW_TASKS.index(COPY), tokens, roles)

    def random_row(self, rng: random.Random, length: int, shortest: int) -> Row:
        """Make a row with a random task, a random length in [shortest, length] and a random number of questions."""
        size = length if rng.random() < FULL_LENGTH_SHARE else rng.randint(min(shortest, length), length)
        recipes = self.mixture.recipes
        names = [name for name in ROW_TASKS if name in recipes and recipes[name].shortest <= size]
        weights = [recipes[name].weight * (0.1 if name == COPY and length > COPY_LENGTHS else 1) for name in names]
        task = rng.choices(names, weights)[0]
        cost = recipes[task].cost
        questions = 1
        if cost and rng.random() >= SINGLE_QUESTION_SHARE:
            questions = max(1, int(rng.uniform(0.2, 0.9) * size / cost))
        return self.row(rng, task, size, questions)

    def batch(self, seed: int, step: int, rows: int, length: int) -> Batch:
        """Make the batch of a step.

        Args:
            seed: seed of the run.
            step: step number.
            rows: R.
            length: T in tokens.

        Returns:
            The batch, which depends on the arguments alone.
        """
        rng = random.Random(f"data/{seed}/{step}")
        tokens = np.full((rows, length), self.mixture.form.pad, np.uint16)
        roles = np.zeros((rows, length), np.uint16)
        tasks = np.zeros(rows, np.int32)
        shortest = SHORTEST if length <= 512 else length // 2
        for index in range(rows):
            row = self.random_row(rng, length, shortest)
            tokens[index, : len(row.tokens)] = row.tokens
            roles[index, : len(row.roles)] = row.roles
            tasks[index] = row.task
        return Batch(tokens, roles, tasks)


_maker = functools.cache(RowMaker)  # a worker process reads the texts once


def _batch(tokenizer_file: pathlib.Path, texts: tuple[pathlib.Path, ...], mixture: Mixture, *step: int) -> Batch:
    return _maker(tokenizer_file, texts, mixture).batch(*step)


def _begin_worker() -> None:
    end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # the whole group receives them, but the parent decides when to stop
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker uses a single core


class Loader:
    """Batches in the order of the steps, which worker processes make ahead.

    Args:
        tokenizer_file: the model's tokenizer.json.
        texts: prose files besides `pydoc_data.topics`.
        course: batch shapes, and what rows are made of.
        seed: seed of the data.
        first_step: the step at which a resumed run continues.
        workers: processes; with 0, this process makes the batches.
    """

    def __init__(
        self,
        tokenizer_file: pathlib.Path,
        texts: Sequence[pathlib.Path],
        course: Course,
        seed: int,
        first_step: int,
        workers: int,
    ) -> None:
        self._arguments = (tokenizer_file, tuple(texts), course.mixture)
        self._steps = ((seed, step, *course.bucket(step, seed)) for step in range(first_step, course.steps))
        self._ahead: collections.deque[concurrent.futures.Future[Batch]] = collections.deque()
        self._pool = None
        if workers:
            spawn = multiprocessing.get_context("spawn")
            self._pool = concurrent.futures.ProcessPoolExecutor(workers, spawn, _begin_worker)
            with held_interrupts():
                self._submit(workers * _DEPTH)

    def next(self) -> Batch:
        """Return the batch of the next step.

        Raises:
            StopIteration: the course has no further step.
            RuntimeError: a worker has ended.
        """
        if self._pool is None:
            return _batch(*self._arguments, *next(self._steps))
        if not self._ahead:
            raise StopIteration
        batch = self._ahead.popleft().result()
        self._submit(1)
        return batch

    def _submit(self, count: int) -> None:
        for step in itertools.islice(self._steps, count):
            self._ahead.append(self._pool.submit(_batch, *self._arguments, *step))

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
