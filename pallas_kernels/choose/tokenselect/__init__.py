"""Operations of this room that only TokenSelect uses."""
