"""Operations of this room that only RetroInfer uses."""
