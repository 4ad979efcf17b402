"""Operations: signature with shapes, torch reference, fast kernels; one file each."""
