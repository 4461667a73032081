/* What the extension module has of _lock.c. */

#include <Python.h>

#pragma GCC visibility push(hidden)
int add_lock(PyObject *module);
PyObject *hold_signals(PyObject *module, PyObject *numbers);
PyObject *signal_waits(PyObject *module, PyObject *ignored);
PyObject *has_other_locks(PyObject *module, PyObject *lock);
PyObject *take_back(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
#pragma GCC visibility pop
