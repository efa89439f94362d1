"""Operations that choose: from scores or codes to lists of slots, pages or clusters."""
