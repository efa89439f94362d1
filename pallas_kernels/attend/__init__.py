"""Operations that attend: softmax over keys, and the sum of values."""
