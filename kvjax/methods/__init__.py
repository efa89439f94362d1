"""The methods. A new method needs its own file, an oracle in ``tests/oracles``, and one import line here."""

from kvjax.methods.adakv import AdaKV as AdaKV
from kvjax.methods.chess.method import Chess as Chess
from kvjax.methods.expectedattention import ExpectedAttention as ExpectedAttention
from kvjax.methods.freekv import FreeKV as FreeKV
from kvjax.methods.full import Full as Full
from kvjax.methods.h2o import H2O as H2O
from kvjax.methods.keydiff import KeyDiff as KeyDiff
from kvjax.methods.knorm import Knorm as Knorm
from kvjax.methods.magicpig import MagicPIG as MagicPIG
from kvjax.methods.mosaickv.method import MosaicKV as MosaicKV
from kvjax.methods.ntk import NTK as NTK
from kvjax.methods.observedattention import ObservedAttention as ObservedAttention
from kvjax.methods.pariskv.method import ParisKV as ParisKV
from kvjax.methods.pi import PI as PI
from kvjax.methods.pqcache import PQCache as PQCache
from kvjax.methods.pyramidkv import PyramidKV as PyramidKV
from kvjax.methods.quest import Quest as Quest
from kvjax.methods.retrievalattention import RetrievalAttention as RetrievalAttention
from kvjax.methods.rkv import RKV as RKV
from kvjax.methods.selfextend import SelfExtend as SelfExtend
from kvjax.methods.sentencekv.method import SentenceKV as SentenceKV
from kvjax.methods.snapkv import SnapKV as SnapKV
from kvjax.methods.socket import SOCKET as SOCKET
from kvjax.methods.streamingllm import StreamingLLM as StreamingLLM
from kvjax.methods.tokenselect import TokenSelect as TokenSelect
from kvjax.methods.tova import TOVA as TOVA
