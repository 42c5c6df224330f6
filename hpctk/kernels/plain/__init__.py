"""The kernels without numba, in numpy: one module for each file of kernels, one function for each that is called.

`compiled` takes a kernel from here where numba is missing. The same arguments, the same results to the bit, in
several passes where the compiled kernel makes one; so

- a sum that a kernel forms one by one is formed one by one here, too: `ordered.add_in_order`;
- what is computed in float32 there is so here: no number of Python or of float64 meets the arrays.

What a compiled kernel leaves undefined (the bits of a NaN) is undefined here as well.
"""
