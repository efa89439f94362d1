"""Operations of this room that only ShadowKV uses."""
