/* What the extension module has of _passing.c. */

#include <Python.h>

#pragma GCC visibility push(hidden)
PyObject *receive_passing(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
#pragma GCC visibility pop
