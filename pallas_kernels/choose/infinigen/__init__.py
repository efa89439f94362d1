"""Operations of this room that only InfiniGen uses."""
