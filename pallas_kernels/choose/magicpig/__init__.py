"""Operations of this room that only MagicPIG uses."""
