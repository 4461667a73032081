/* A lock for the main thread, too: while that holds one, no signal handler of Python's
   runs in it. Handlers raise exceptions, KeyboardInterrupt above all, between any two
   bytecodes; what is done under such a lock is done as a whole.

   Python's own C handler only notes that a signal came, and the main thread then calls
   the handler in Python. Ours stands before it, passes the signal on at once if no such
   lock is held, and else when it is released. What `signal` knows of is unchanged. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#include "_lock.h"

#define OVERDUE_NS 1000000000 /* signals pass if the main thread is stuck for so long */
#define LOOK_NS 20000000      /* between looks at which handlers there are */
#if PY_VERSION_HEX < 0x030D0000
#define Py_IsFinalizing _Py_IsFinalizing
#endif
#define FOR_EVER (-1)
#define AT_ALL_COSTS (-2)

static void (*python_handler)(int); /* NULL until some signal has it */
static PyObject *getsignal;         /* as in `signal`; NULL until signals are to wait */
static unsigned char watched[NSIG]; /* the signals that are to wait */
static int64_t looked_at;
static _Atomic unsigned long main_thread;
static atomic_int depth;     /* locks that the main thread holds, or is about to */
static atomic_int handling;  /* threads in `on_signal` */
static atomic_uint passed;   /* how many signals were passed on */
static atomic_int waits;     /* whether any signal waits */
static atomic_int waiting[NSIG];
static _Atomic int64_t waits_since;
static int generation = 1; /* grows with each fork */

static inline int64_t
nanoseconds(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int
overdue(void)
{
    int64_t now = nanoseconds(CLOCK_MONOTONIC), since = 0;
    return !atomic_compare_exchange_strong(&waits_since, &since, now)
           && now - since > OVERDUE_NS;
}

static void
pass_on(int number)
{
    atomic_fetch_add(&passed, 1);
    python_handler(number);
}

/* Runs in any thread, and calls nothing that a signal handler must not. */
static void
on_signal(int number)
{
    int before = errno;
    atomic_fetch_add(&handling, 1);
    if (atomic_load(&depth) == 0 || overdue()) {
        atomic_store(&waiting[number], 0); /* it counts for the one that waits */
        pass_on(number);
    } else {
        atomic_store(&waiting[number], 1);
        atomic_store(&waits, 1);
        /* The lock may have been released meanwhile, by another thread than this. */
        if (atomic_load(&depth) == 0 && atomic_exchange(&waiting[number], 0))
            pass_on(number);
    }
    atomic_fetch_sub(&handling, 1);
    errno = before;
}

static void
let_go(void)
{
    if (atomic_fetch_sub(&depth, 1) != 1 || !atomic_load(&waits))
        return;
    atomic_store(&waits, 0);
    for (int number = 1; number < NSIG; number++)
        if (atomic_exchange(&waiting[number], 0)) {
            atomic_fetch_add(&passed, 1);
            PyErr_SetInterruptEx(number);
        }
}

/* Whether a signal's handler is that by which Python calls one of its own.

   `faulthandler` puts itself before that of a signal, with one of two flags that Python's
   has not. So may a library's, of which Python knows nothing. */
static int
is_pythons(int number, const struct sigaction *action)
{
    Dl_info its, pythons;
    if (action->sa_flags & (SA_NODEFER | SA_RESTART) || action->sa_handler == SIG_DFL
        || action->sa_handler == SIG_IGN || action->sa_handler == on_signal
        || !dladdr((void *)action->sa_handler, &its)
        || !dladdr((void *)PyErr_CheckSignals, &pythons)
        || its.dli_fbase != pythons.dli_fbase)
        return 0;
    PyObject *handler = PyObject_CallFunction(getsignal, "i", number);
    int found = handler != NULL && PyCallable_Check(handler);
    Py_XDECREF(handler);
    PyErr_Clear();
    return found;
}

/* Put ours before Python's handler of each signal that is to wait; how many do. */
static int
look(void)
{
    int held = 0;
    for (int number = 1; number < NSIG; number++) {
        struct sigaction action;
        if (!watched[number] || sigaction(number, NULL, &action) < 0
            || action.sa_flags & SA_SIGINFO)
            continue;
        /* None may have one yet: SIGINT is ignored where a shell started it with `&`. */
        if (python_handler == NULL && is_pythons(number, &action))
            python_handler = action.sa_handler;
        if (python_handler != NULL && action.sa_handler == python_handler) {
            action.sa_handler = on_signal;
            sigaction(number, &action, NULL);
        }
        held += action.sa_handler == on_signal;
    }
    return held;
}

/* From here on signals wait; those that came before are handled now, which may raise. */
static int
hold(void)
{
    if (atomic_load(&depth) > 0) {
        atomic_fetch_add(&depth, 1);
        return 0;
    }
    if (getsignal != NULL) {
        /* Any call may have been given another handler since. */
        int64_t now = nanoseconds(CLOCK_MONOTONIC_COARSE);
        if (now - looked_at > LOOK_NS) {
            looked_at = now;
            look();
        }
    }
    for (;;) {
        /* Handlers run while nothing is held: they may do anything, and take long. */
        unsigned before = atomic_load(&passed);
        if (PyErr_CheckSignals() < 0)
            return -1;
        atomic_store(&waits_since, 0);
        atomic_fetch_add(&depth, 1);
        while (atomic_load(&handling))
            sched_yield(); /* another thread is about to note one */
        if (atomic_load(&passed) == before)
            return 0;
        let_go();
    }
}

PyObject *
hold_signals(PyObject *module, PyObject *numbers)
{
    if (getsignal == NULL) {
        PyObject *signals = PyImport_ImportModule("_signal");
        getsignal = signals == NULL ? NULL : PyObject_GetAttrString(signals, "getsignal");
        Py_XDECREF(signals);
    }
    PyObject *items
        = getsignal == NULL ? NULL : PySequence_Fast(numbers, "a list of signals");
    if (items == NULL)
        return NULL;
    for (Py_ssize_t n = 0; n < PySequence_Fast_GET_SIZE(items); n++) {
        long number = PyLong_AsLong(PySequence_Fast_GET_ITEM(items, n));
        if (!PyErr_Occurred() && (number < 1 || number >= NSIG))
            PyErr_Format(PyExc_ValueError, "there is no signal %ld", number);
        if (PyErr_Occurred())
            break;
        watched[number] = 1;
    }
    Py_DECREF(items);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(look());
}

PyObject *
signal_waits(PyObject *module, PyObject *ignored)
{
    return PyBool_FromLong(atomic_load(&waits));
}

/* -- the lock ---------- */

typedef struct Lock {
    PyObject_HEAD
    PyThread_type_lock lock;
    int locked;
    int held; /* the generation in which the main thread took it, or 0 */
    unsigned long holder; /* the thread that has it, if it is locked */
    struct Lock *next;    /* of those that are locked */
} Lock;

typedef struct Waiter { /* on the stack of the thread */
    unsigned long thread;
    Lock *lock;
    struct Waiter *next;
} Waiter;

static PyTypeObject *lock_type;
static Lock *taken;     /* all that are, few at any time; the GIL is held to look */
static Waiter *waiters; /* who waits for ever for one */

static void
set_locked(Lock *self, unsigned long holder)
{
    self->locked = 1;
    self->holder = holder;
    self->next = taken;
    taken = self;
}

static void
set_free(Lock *self)
{
    self->locked = self->held = 0;
    for (Lock **at = &taken; *at != NULL; at = &(*at)->next)
        if (*at == self) {
            *at = self->next;
            return;
        }
}

/* In a forked child: what other threads had, and wait for, they have there no more. */
static void
keep_mine(void)
{
    unsigned long me = PyThread_get_thread_ident();
    for (Lock **at = &taken; *at != NULL;) {
        if ((*at)->holder == me)
            at = &(*at)->next;
        else
            *at = (*at)->next;
    }
    for (Waiter **at = &waiters; *at != NULL;) {
        if ((*at)->thread == me)
            at = &(*at)->next;
        else
            *at = (*at)->next;
    }
}

static int
has_other_than(const Lock *self, unsigned long me)
{
    for (const Lock *one = taken; one != NULL; one = one->next)
        if (one != self && one->holder == me)
            return 1;
    return 0;
}

/* Whether who has the lock waits for this thread, or for one that does. */
static int
would_wait_for_ever(const Lock *self, unsigned long me)
{
    /* Bounded: where destructors of other threads are at it, they may be in a circle. */
    for (int hops = 0; hops < 64 && self->locked; hops++) {
        if (self->holder == me)
            return 1;
        if (Py_IsFinalizing())
            return 0; /* other threads ended where they waited, and their stacks */
        const Waiter *waiter = waiters;
        while (waiter != NULL && waiter->thread != self->holder)
            waiter = waiter->next;
        if (waiter == NULL)
            return 0;
        self = waiter->lock;
    }
    return 0;
}

static void
begin_to_wait(Waiter *waiter)
{
    waiter->next = waiters;
    waiters = waiter;
}

static void
end_waiting(const Waiter *waiter)
{
    for (Waiter **at = &waiters; *at != NULL; at = &(*at)->next)
        if (*at == waiter) {
            *at = waiter->next;
            return;
        }
}

static void
after_fork(void)
{
    generation++;
    keep_mine();
    atomic_store(&main_thread, PyThread_get_thread_ident());
    atomic_store(&depth, 0);
    atomic_store(&handling, 0);
    atomic_store(&waits, 0);
    atomic_store(&waits_since, 0);
    for (int number = 1; number < NSIG; number++)
        atomic_store(&waiting[number], 0);
}

/* Take it; -1 is an exception, 0: it did not become free in time. An interrupt may come
   before it is taken, never after.

   `micros`: how long to wait; FOR_EVER: unless that would never end; AT_ALL_COSTS. */
static int
take(Lock *self, int64_t micros)
{
    unsigned long me = PyThread_get_thread_ident();
    int in_main = me == atomic_load(&main_thread);
    if (in_main && hold() < 0)
        return -1;
    int64_t until = micros > 0 ? nanoseconds(CLOCK_MONOTONIC) / 1000 + micros : 0;
    int got = PyThread_acquire_lock(self->lock, NOWAIT_LOCK);
    while (!got && micros != 0) {
        if (micros == FOR_EVER && would_wait_for_ever(self, me)) {
            if (in_main)
                let_go();
            PyErr_SetString(PyExc_RuntimeError,
                            "this thread is in the middle of a queue's own work: a "
                            "destructor, a hook or a signal's handler that was "
                            "installed a moment ago called a queue, which would wait "
                            "for ever; call it from another thread");
            return -1;
        }
        PyLockStatus status;
        Waiter waiter = {.thread = me, .lock = self};
        if (micros < 0)
            begin_to_wait(&waiter);
        Py_BEGIN_ALLOW_THREADS
        status = PyThread_acquire_lock_timed(self->lock, micros < 0 ? -1 : micros, 1);
        Py_END_ALLOW_THREADS
        if (micros < 0)
            end_waiting(&waiter);
        if (status == PY_LOCK_FAILURE)
            break;
        got = status == PY_LOCK_ACQUIRED;
        if (!got && in_main) {
            let_go();
            /* Another lock may be held still; then these are overdue ones. */
            if (PyErr_CheckSignals() < 0 || hold() < 0)
                return -1;
        }
        if (!got && micros > 0) {
            int64_t left = until - nanoseconds(CLOCK_MONOTONIC) / 1000;
            micros = left > 0 ? left : 0;
        }
    }
    if (got) {
        self->held = in_main ? generation : 0;
        set_locked(self, me);
    } else if (in_main) {
        let_go();
    }
    return got;
}

static void
give(Lock *self)
{
    int held = self->held;
    set_free(self);
    PyThread_release_lock(self->lock);
    if (held == generation)
        let_go();
}

static PyObject *
lock_acquire(Lock *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"blocking", "timeout", NULL};
    int blocking = 1;
    double timeout = -1.0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|pd", names, &blocking, &timeout))
        return NULL;
    if (timeout != -1.0 && (!blocking || !(timeout >= 0.0 && timeout < 1e9))) {
        PyErr_SetString(PyExc_ValueError, "timeout is for one that blocks, up to 1e9 s");
        return NULL;
    }
    int64_t micros = timeout < 0.0 ? FOR_EVER : (int64_t)(timeout * 1e6);
    int got = take(self, blocking ? micros : 0);
    return got < 0 ? NULL : PyBool_FromLong(got);
}

static PyObject *
lock_enter(Lock *self, PyObject *ignored)
{
    return take(self, FOR_EVER) < 0 ? NULL : Py_NewRef(Py_True);
}

static PyObject *
lock_release(Lock *self, PyObject *ignored)
{
    if (!self->locked) {
        PyErr_SetString(PyExc_RuntimeError, "release unlocked lock");
        return NULL;
    }
    give(self);
    Py_RETURN_NONE;
}

static PyObject *
lock_locked(Lock *self, PyObject *ignored)
{
    return PyBool_FromLong(self->locked);
}

static PyObject *
lock_is_mine(Lock *self, PyObject *ignored)
{
    return PyBool_FromLong(self->locked && self->holder == PyThread_get_thread_ident());
}

PyObject *
has_other_locks(PyObject *module, PyObject *lock)
{
    /* It may be something else, as None is: no Lock is where that is. */
    return PyBool_FromLong(
        has_other_than((const Lock *)lock, PyThread_get_thread_ident()));
}

/* In a forked child: who had it does not exist there, unless it is who forked. */
static PyObject *
lock_at_fork_reinit(Lock *self, PyObject *ignored)
{
    if (self->locked && self->holder == PyThread_get_thread_ident())
        Py_RETURN_NONE;
    PyThread_type_lock lock = PyThread_allocate_lock();
    if (lock == NULL)
        return PyErr_NoMemory();
    self->lock = lock; /* the other is left as it is, as Python leaves its own */
    set_free(self);
    Py_RETURN_NONE;
}

/* Take it again where it was given up, whatever handlers raise meanwhile: the last of
   that is raised once it is taken. */
PyObject *
take_back(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 2 || Py_TYPE(arguments[0]) != lock_type) {
        PyErr_SetString(PyExc_TypeError, "take_back() takes a Lock, and what it gave");
        return NULL;
    }
    Lock *self = (Lock *)arguments[0];
    if (self->locked && self->holder == PyThread_get_thread_ident())
        Py_RETURN_NONE;
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    while (take(self, AT_ALL_COSTS) < 0) {
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        PyErr_Fetch(&type, &value, &traceback);
    }
    if (type == NULL)
        Py_RETURN_NONE;
    PyErr_Restore(type, value, traceback);
    return NULL;
}

static PyObject *
lock_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (!PyArg_ParseTuple(args, ""))
        return NULL;
    Lock *self = (Lock *)type->tp_alloc(type, 0);
    if (self != NULL && (self->lock = PyThread_allocate_lock()) == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void
lock_dealloc(Lock *self)
{
    PyTypeObject *type = Py_TYPE(self);
    if (self->locked)
        give(self);
    if (self->lock != NULL)
        PyThread_free_lock(self->lock);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef lock_methods[] = {
    {"acquire", (PyCFunction)(void (*)(void))lock_acquire, METH_VARARGS | METH_KEYWORDS,
     NULL},
    {"release", (PyCFunction)lock_release, METH_NOARGS, NULL},
    {"locked", (PyCFunction)lock_locked, METH_NOARGS, NULL},
    {"is_mine", (PyCFunction)lock_is_mine, METH_NOARGS, NULL},
    {"_at_fork_reinit", (PyCFunction)lock_at_fork_reinit, METH_NOARGS, NULL},
    {"__enter__", (PyCFunction)lock_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)lock_release, METH_VARARGS, NULL},
    {NULL},
};

static PyType_Slot lock_slots[] = {
    {Py_tp_new, lock_new},
    {Py_tp_dealloc, lock_dealloc},
    {Py_tp_methods, lock_methods},
    {0, NULL},
};

static PyType_Spec lock_spec = {
    .name = "mq._speed.Lock",
    .basicsize = sizeof(Lock),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = lock_slots,
};

int
add_lock(PyObject *module)
{
    static int watched;
    PyObject *threading = PyImport_ImportModule("threading");
    PyObject *thread
        = threading == NULL ? NULL : PyObject_CallMethod(threading, "main_thread", NULL);
    PyObject *ident = thread == NULL ? NULL : PyObject_GetAttrString(thread, "ident");
    unsigned long number = ident == NULL ? 0 : PyLong_AsUnsignedLong(ident);
    Py_XDECREF(ident);
    Py_XDECREF(thread);
    Py_XDECREF(threading);
    PyObject *lock = PyErr_Occurred() ? NULL : PyType_FromSpec(&lock_spec);
    if (lock == NULL)
        return -1;
    lock_type = (PyTypeObject *)lock;
    atomic_store(&main_thread, number);
    if (!watched && pthread_atfork(NULL, NULL, after_fork) == 0)
        watched = 1;
    if (PyModule_AddObject(module, "Lock", lock) < 0) {
        Py_DECREF(lock);
        return -1;
    }
    return 0;
}
