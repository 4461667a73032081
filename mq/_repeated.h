/* What the extension module has of _repeated.c. */

#include <Python.h>

#pragma GCC visibility push(hidden)
int intern_repeated(void);
PyObject *are_bools(PyObject *module, PyObject *memory);
PyObject *know_arrays(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *know_objects(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *know_tensors(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *pack_mixed(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *pack_repeated(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *take_aligned(PyObject *module, PyObject *size);
PyObject *unpack_mixed(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *unpack_repeated(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
#pragma GCC visibility pop
