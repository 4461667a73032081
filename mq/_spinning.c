/* Looks at an epoll set again and again, without the interpreter lock: `Poller._spin` of
   mq/mesh/poller.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_spinning.h"

#ifdef __linux__

#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#define MOST 64 /* descriptors told of by one look; the others are there at the next */

typedef struct {
    PyObject_HEAD
    int fd;    /* a copy of our own, so that nobody looks at another file; -1: it is closed */
    int looks; /* threads in `spin`, the last of which closes it */
    pid_t pid; /* in a forked child there are none of them */
    atomic_int closing;
} Spinner;

static double
seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static void
let_go(Spinner *self)
{
    int fd = self->fd;
    self->fd = -1;
    if (fd >= 0)
        close(fd);
}

static PyObject *
numbers(const struct epoll_event *events, int count)
{
    PyObject *found = PyList_New(count);
    for (int n = 0; found != NULL && n < count; n++) {
        PyObject *number = PyLong_FromLong(events[n].data.fd);
        if (number == NULL)
            Py_CLEAR(found);
        else
            PyList_SET_ITEM(found, n, number);
    }
    return found;
}

static PyObject *
spin(Spinner *self, PyObject *seconds)
{
    double until = PyFloat_AsDouble(seconds);
    if (until == -1.0 && PyErr_Occurred())
        return NULL;
    if (self->fd < 0 || self->closing)
        return PyList_New(0);
    until += seconds_now();
    struct epoll_event events[MOST];
    int count;
    self->looks++;
    Py_BEGIN_ALLOW_THREADS
    while ((count = epoll_wait(self->fd, events, MOST, 0)) == 0
           && !atomic_load_explicit(&self->closing, memory_order_relaxed)
           && seconds_now() < until)
        sched_yield(); /* the engine and the peers may need the core */
    Py_END_ALLOW_THREADS
    if (--self->looks == 0 && self->closing)
        let_go(self);
    return numbers(events, count < 0 ? 0 : count);
}

static PyObject *
close_spinner(Spinner *self, PyObject *ignored)
{
    self->closing = 1;
    if (self->looks == 0 || self->pid != getpid())
        let_go(self);
    Py_RETURN_NONE;
}

static PyObject *
spinner_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    int fd;
    if (!PyArg_ParseTuple(args, "i", &fd))
        return NULL;
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (copy < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Spinner *self = (Spinner *)type->tp_alloc(type, 0);
    if (self == NULL) {
        close(copy);
        return NULL;
    }
    self->fd = copy;
    self->pid = getpid();
    return (PyObject *)self;
}

static void
spinner_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    let_go((Spinner *)self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef spinner_methods[] = {
    {"spin", (PyCFunction)spin, METH_O, NULL},
    {"close", (PyCFunction)close_spinner, METH_NOARGS, NULL},
    {NULL},
};

static PyType_Slot spinner_slots[] = {
    {Py_tp_new, spinner_new},
    {Py_tp_dealloc, spinner_dealloc},
    {Py_tp_methods, spinner_methods},
    {0, NULL},
};

PyType_Spec spinner_spec = {
    .name = "mq._speed.Spinner",
    .basicsize = sizeof(Spinner),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = spinner_slots,
};

#endif
