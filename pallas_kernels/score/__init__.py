"""Operations that score tokens, pages, clusters or codes."""
