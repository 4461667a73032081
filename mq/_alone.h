/* What the extension module has of _alone.c. */

#include <Python.h>

#pragma GCC visibility push(hidden)
PyObject *arrive_alone(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
int intern_alone(void);
/* Whether an attribute is true; -1: an exception. */
int is_set(PyObject *owner, PyObject *name);
PyObject *know_arrivals(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *know_frames(PyObject *module, PyObject *type);
PyObject *send_alone(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *take_alone(PyObject *module, PyObject *inbox);
#pragma GCC visibility pop
