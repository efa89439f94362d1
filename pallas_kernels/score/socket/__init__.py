"""Operations of this room that only SOCKET uses."""
