"""Operations that store a token or change metadata in place."""
