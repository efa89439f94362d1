"""Operations of this room that only MosaicKV uses."""
