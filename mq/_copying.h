/* What the extension module has of _copying.c. */

#include <Python.h>

#pragma GCC visibility push(hidden)
int add_copying(void);
PyObject *copy(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *expect_copy(PyObject *module, PyObject *size);
PyObject *fill(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *follow(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
#pragma GCC visibility pop
