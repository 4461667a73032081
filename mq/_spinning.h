/* What the extension module has of _spinning.c. */

#include <Python.h>

#pragma GCC visibility push(hidden)
/* The type `Spinner`, where there is epoll. */
int add_spinner(PyObject *module);
#pragma GCC visibility pop
