"""Synthetic long-context tasks: text drawn from a seed, fitted to a length for any tokenizer, with exact scorers."""

from experiments.tasks.base import PROMPTS as PROMPTS
from experiments.tasks.base import Document as Document
from experiments.tasks.base import Example as Example
from experiments.tasks.base import Request as Request
from experiments.tasks.base import check_name as check_name
from experiments.tasks.code_files import library_origin as library_origin
from experiments.tasks.fitting import length_within as length_within
from experiments.tasks.haystack import held_out_text as held_out_text
from experiments.tasks.haystack import prose_text as prose_text
from experiments.tasks.haystack import source_text as source_text
from experiments.tasks.registry import GROUPS as GROUPS
from experiments.tasks.registry import TASKS as TASKS
from experiments.tasks.registry import expand as expand
from experiments.tasks.registry import get_task as get_task
from experiments.tasks.registry import haystack_for as haystack_for
from experiments.tasks.registry import make_document as make_document
from experiments.tasks.registry import make_documents as make_documents
from experiments.tasks.registry import make_samples as make_samples
from experiments.tasks.registry import reads_library as reads_library
from experiments.tasks.registry import score as score
from experiments.tasks.texts import check_unicode as check_unicode
from experiments.tasks.texts import decode_text as decode_text
from experiments.tasks.texts import encode_prompt as encode_prompt
from experiments.tasks.texts import opening_ids as opening_ids
from experiments.tasks.texts import read_text as read_text
from experiments.tasks.texts import reference_text as reference_text
