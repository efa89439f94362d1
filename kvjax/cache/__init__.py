"""Store the keys and values of each layer, in six forms behind one interface (`LayerStorage`).

`PlainCache` has key and value [B, H, S, D], position int32 [B, H, S] and cursor int32 [B]:

* A slot holds a token iff ``position >= 0``, in each head. Evicted slots, padding and slots that were never written look
  the same.
* Each row has a cursor, and padding is on the right. So a row of a batch uses the slots that it would use alone, and
  generates the same tokens. Prompt chunks are slice updates; a kernel stores a decode step's token.
* `PlainCache.evict` moves the newest token into the evicted slot: one row per head is copied and nothing is shifted, so
  slots are not in the order of positions. `LayerCache.compact` shrinks storage at the prompt's end.

The other forms:

* ``offload``: the rows of all slots are in pinned host memory, key and value of a slot side by side. The device has copies
  of the first slots and of a ring of the newest, whose size a method says (`near`); with `keys_stay` it has all keys.
  Kernels read each row where it is. A step writes only to the ring, and `sync` writes the ring to the host, every 32 steps
  (fewer where the ring is smaller) and at the end of every call. While a prompt chunk attends, one layer at a time is
  staged back.
* ``quantised``: codes of 8 or 4 bits with scales for each token and KV head (``kv_dtype``). `LayerStorage.stored` has codes
  for operations that multiply them; ``key`` and ``value`` dequantise where they are used. An operation that wants the
  newest key gets a copy (`newest_key`), because a kernel's operand is written to memory first. An offloaded cache of codes
  has them in host memory and the scales of all slots on the device.
* ``packed_keys``: the first slots have some channels of their keys, packed, and the later slots have whole keys (ThinK).
  Attention multiplies packed keys as they are.
* ``divided``: this device's slots of rows that a mesh divides along the axis ``slots`` (`PartCache`).
* ``latent``: keys that are the values too, as in latent attention (MLA), stored once, also as codes (`LatentCache`).

A `Cache` has one state per layer, a tuple of arrays of their own, which functions donate: layers may differ in shape, and
stacked layers would be copied in a loop. It carries the method that made it. A method of equal structure may replace its
traced values; another structure is an error.
"""

from kvjax.cache.storage import LayerCache as LayerCache
from kvjax.cache.storage import LayerSpec as LayerSpec
from kvjax.cache.storage import LayerStorage as LayerStorage
from kvjax.cache.storage import PlainCache as PlainCache
from kvjax.cache.whole_model import Cache as Cache
