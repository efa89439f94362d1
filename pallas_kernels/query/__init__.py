"""Operations that prepare queries: rotation, projection, splitting of fused projections."""
